"""The undo log: what it copies, and when copies are not worth their time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raylaunch.worker.survivors import undo_log  # noqa: E402
from raylaunch.worker.survivors.undo_log import UndoLog  # noqa: E402


class Clock:
    """The time, and the time of the CPU that copies take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 0.0
        #: What the next copies take.
        self.cost = 0.0
        monkeypatch.setattr(undo_log, "perf_counter", lambda: self.now)
        monkeypatch.setattr(undo_log, "thread_time", self._thread_time)

    def _thread_time(self) -> float:
        self.cpu += self.cost
        return self.cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def named(*tensors: Any) -> list[tuple[int, Any]]:
    return [*enumerate(tensors)]


def test_what_an_optimizer_changes_is_copied():
    """Its parameters and its state; not what is not trained, nor what another optimizer has."""
    trained, frozen, other = (torch.nn.Parameter(torch.full((4, 5), number)) for number in (1.0, 2.0, 3.0))
    frozen.requires_grad_(False)
    optimizer = torch.optim.Adam([trained, frozen])
    trained.grad = torch.ones(4, 5)
    optimizer.step()
    moments = optimizer.state[trained]["exp_avg"]
    tensors = named(other, trained.detach(), frozen, moments)
    before = {1: trained.detach().clone(), 3: moments.clone()}
    found = UndoLog().record(optimizer, tensors)
    optimizer.step()
    assert found.keys() == before.keys()
    assert all(torch.equal(found[offset], one) for offset, one in before.items())
    assert not torch.equal(trained, before[1])


def test_the_last_copies_are_overwritten_by_the_next(clock):
    clock.now = 1.0
    parameter = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    optimizer, log = torch.optim.SGD([parameter], lr=1), UndoLog()
    tensors = named(parameter)
    first = log.record(optimizer, tensors)[0]
    with torch.no_grad():
        parameter += 1
    assert first.tolist() == [0.0] * 7
    assert log.record(optimizer, [*tensors])[0] is first
    assert first.tolist() == [1.0] * 7


def test_other_tensors_are_other_copies(clock):
    """As after the first step, which makes the optimizer's state, or when that was loaded."""
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer, log = torch.optim.Adam([parameter]), UndoLog()
    assert log.record(optimizer, named(parameter)).keys() == {0}
    parameter.grad = torch.ones(7)
    optimizer.step()
    assert log.record(optimizer, named(parameter, optimizer.state[parameter]["exp_avg"])).keys() == {0, 1}
    optimizer.load_state_dict(optimizer.state_dict())
    tensors = named(parameter, optimizer.state[parameter]["exp_avg"])
    assert torch.equal(log.record(optimizer, tensors)[1], tensors[1][1])


def test_state_of_any_form_is_no_error():
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer = torch.optim.LBFGS([parameter])
    optimizer.state[parameter] = {"old": [torch.ones(7)], "number": 3, "none": None}
    optimizer.state["more"] = [1]
    assert UndoLog().record(optimizer, named(parameter)).keys() == {0}


@pytest.mark.parametrize(("cost", "is_worth_it"), [(0.0009, True), (0.0011, False)])
def test_copies_take_a_share_of_the_time_at_most(clock, cost, is_worth_it):
    """What one of them takes in the worst case does not matter, nor does a short pause. Steps of a second."""
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer, log = torch.optim.SGD([parameter], lr=1), UndoLog()
    tensors = named(parameter)
    found = []
    for number in range(12):
        clock.now += 0.001 if number == 7 else 1.0
        clock.cost = 9.0 if number in (1, 8) else cost
        found.append(log.record(optimizer, tensors) is not None)
    assert found == ([True] * 12 if is_worth_it else [True, True, *[False] * 10])


def test_copies_that_were_given_up_take_no_memory(clock):
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer, log = torch.optim.SGD([parameter], lr=1), UndoLog()
    tensors = named(parameter)
    clock.cost = 1.0
    copy = weakref.ref(log.record(optimizer, tensors)[0])
    assert [log.record(optimizer, tensors) is None for _ in range(3)] == [False, True, True]
    assert copy() is None


def test_too_much_is_not_copied(monkeypatch):
    parameters = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1)
    for most, is_copied in ((8000, True), (7999, False)):
        monkeypatch.setattr(undo_log, "MOST_BYTES", most)
        assert (UndoLog().record(optimizer, named(*parameters)) is not None) == is_copied


def test_what_is_on_a_device_is_not_copied():
    parameter = torch.nn.Parameter(torch.zeros(7, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=1)
    assert UndoLog().record(optimizer, named(parameter)) is None


def test_an_optimizer_is_not_kept_for_longer_than_needed():
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer, log = torch.optim.SGD([parameter], lr=1), UndoLog()
    log.record(optimizer, named(parameter))
    found = weakref.ref(optimizer)
    del optimizer
    assert found() is None
