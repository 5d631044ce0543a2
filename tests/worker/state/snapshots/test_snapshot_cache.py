"""Snapshots after each step: what is taken from the last one, and what must not be."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raylaunch.worker.state.snapshots.snapshot import Snapshot  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot_cache import SnapshotCache  # noqa: E402

SHARED = {"model": lambda _: True}


class Tensor(torch.Tensor):
    """A class of a script."""


class Steps:
    """A model and its optimizer, with what else is committed."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.values: dict[str, Any] = {"epoch": 1, "scale": 0.0, "names": ["a", ("b", None)]}
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 100)).square().mean().backward()
        self.optimizer.step()

    def items(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "values": self.values}


def contents(found: Snapshot) -> Any:
    """Return all that a commit has of a snapshot."""
    tensors = [
        [(at, one.data_ptr(), one.dtype, one.shape) for at, one in each] for each in (found.tensors, found.shared)
    ]
    return tensors, found.pickled, found.tensor_bytes, found.shared_bytes, found.is_replicated


@pytest.fixture
def steps() -> Steps:
    return Steps()


def learning_rate(steps: Steps) -> None:
    steps.optimizer.param_groups[0]["lr"] /= 2


def negative_zero(steps: Steps) -> None:
    steps.values["scale"] = -0.0


def another_type(steps: Steps) -> None:
    steps.values["epoch"] = True


def in_a_tuple(steps: Steps) -> None:
    steps.values["names"][1] = ("b", 0)


def a_list_for_a_tuple(steps: Steps) -> None:
    steps.values["names"][1] = ["b", None]


def another_order(steps: Steps) -> None:
    steps.values["epoch"] = steps.values.pop("epoch")


def another_kind(steps: Steps) -> None:
    steps.values = OrderedDict(steps.values)


def unknown(steps: Steps) -> None:
    steps.values["set"] = {1, 2}


def a_tensor(steps: Steps) -> None:
    steps.values["tensor"] = torch.arange(3)


def a_tensor_of_a_script(steps: Steps) -> None:
    steps.values["tensor"] = torch.arange(3).as_subclass(Tensor)


def a_sparse_tensor(steps: Steps) -> None:
    steps.values["tensor"] = torch.eye(3).to_sparse()


def another_address(steps: Steps) -> None:
    steps.model[0].weight.data = steps.model[0].weight.data.clone()


def another_shape(steps: Steps) -> None:
    steps.model[0].weight.data = steps.model[0].weight.data.view(50, 200)


def another_dtype(steps: Steps) -> None:
    steps.model[1].running_mean = steps.model[1].running_mean.view(torch.int32)


def transposed(steps: Steps) -> None:
    steps.model[0].weight.data = steps.model[0].weight.data.t()


def another_state(steps: Steps) -> None:
    steps.optimizer.state[steps.model[0].weight]["max_exp_avg_sq"] = torch.ones(100)


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        (Steps.step, []),
        (learning_rate, ["optimizer"]),
        (negative_zero, ["values"]),
        (another_type, ["values"]),
        (in_a_tuple, ["values"]),
        (a_list_for_a_tuple, ["values"]),
        (another_order, ["values"]),
        (another_kind, ["values"]),
        (unknown, ["values"]),
        (a_tensor, ["values"]),
        (a_tensor_of_a_script, ["values"]),
        (a_sparse_tensor, ["values"]),
        (another_address, ["model"]),
        (another_shape, ["model"]),
        (another_dtype, ["model"]),
        (transposed, ["model", "optimizer", "values"]),
        (another_state, ["optimizer", "values"]),
    ],
)
def test_what_has_changed_is_taken_anew(steps: Steps, change, anew):
    """A snapshot is what it would be without the last one. What comes after more tensors has other places."""
    cache = SnapshotCache(["model", "optimizer"], SHARED)
    last = cache.take(steps.items())
    change(steps)
    found = cache.take(steps.items())
    assert [name for name, part in found.parts.items() if part is not last.parts[name]] == anew
    expected = Snapshot(steps.items(), ["model", "optimizer"], SHARED)
    assert contents(found) == contents(expected)
    assert contents(cache.take(steps.items())) == contents(expected)


def test_other_items_are_taken_anew(steps: Steps):
    cache = SnapshotCache([], SHARED)
    for items in (steps.items(), {"values": 1}, steps.items(), {"values": 1, "more": torch.ones(2)}):
        assert contents(cache.take(items)) == contents(Snapshot(items, [], SHARED))


def test_the_last_snapshot_stays_as_it_is(steps: Steps):
    """A survivor may still complete the commit that was made of it."""
    cache = SnapshotCache([], SHARED)
    cache.take(steps.items())
    before = cache.take(steps.items())
    found = contents(before)
    steps.values["epoch"] = 2
    assert cache.take(steps.items()).pickled != before.pickled
    assert contents(before) == found
