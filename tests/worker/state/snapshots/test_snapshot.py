"""`Snapshot`: what it says of values that cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from raylaunch.worker.state.snapshots import snapshot
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot


class Fails:
    def __reduce__(self):
        msg = "not today"
        raise ValueError(msg)


@pytest.mark.parametrize(
    ("name", "item", "said"),
    [
        ("values", {"a": 1, "lock": threading.Lock()}, r"values\['lock'\]: cannot pickle '_thread.lock' object"),
        ("values", {"a": {"b": torch.zeros(2), 3: Fails()}}, r"values\['a'\]\[3\]: not today"),
        (OBJECT + "its", {"f": [lambda: 0]}, r"its\.state_dict\(\)\['f'\]: .*<lambda>"),
        (OBJECT + "its", {Fails(): 1}, r"its\.state_dict\(\): not today"),
        (OBJECT + "its", Fails(), r"its\.state_dict\(\): not today"),
    ],
)
def test_what_cannot_be_pickled_is_named(name, item, said):
    with pytest.raises(pickle.PicklingError, match=f"^`State` cannot pickle {said}"):
        Snapshot({name: item})


@pytest.mark.parametrize(
    ("device", "current", "expected"), [("cuda:5", 5, "cuda"), ("cuda:5", 0, "cuda:5"), ("cpu", 0, "cpu")]
)
def test_the_current_device_has_no_index(monkeypatch, device, current, expected):
    """The rank may have another local rank where it is restored, and then that device is another rank's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert snapshot._device(torch, SimpleNamespace(device=torch.device(device))) == expected  # noqa: SLF001


def test_what_torch_cannot_copy_on_a_stream_is_pickled_as_torch_does():
    assert Snapshot({"values": torch.zeros(2)}).tensors
    assert not Snapshot({"values": torch.zeros(2, device="meta")}).tensors
