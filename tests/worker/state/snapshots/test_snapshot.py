"""`Snapshot`: what it says of values that cannot be pickled."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

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
