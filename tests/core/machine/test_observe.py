"""The events that follow from what nodes say of their workers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.machine.events_and_actions import (
    WorkersCheckpointed,
    WorkersElastic,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.observe import observe
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from tests.core.machine_helpers import job, joined
from tests.profiles import examples

NEW = WorkersStatus()


def seen(*statuses, now=10.0, sent_at=3.0):
    """Return the events that follow from each status after the one before."""
    return [
        event
        for old, new in zip((NEW, *statuses), statuses, strict=False)
        for event in observe("a", old, new, now=now, sent_at=sent_at)
    ]


def failure(rank, at=1.0, attempt=1):
    return WorkerExit(attempt=attempt, rank=rank, local_rank=rank, pid=7, exit_code=-9, at=at)


def test_times_of_a_node_become_times_of_the_run():
    """A worker that died two seconds before the status was sent died two seconds ago."""
    (event,) = seen(WorkersStatus(attempt=1, failures=(failure(0),)))
    assert event == WorkersExited(at=10.0, attempt=1, node="a", failures=event.failures)
    assert [(one.node, one.rank, one.at) for one in event.failures] == [("a", 0, 8.0)]


def test_workers_are_gone_when_all_have_ended_by_themselves_or_were_ended():
    assert not WorkersStatus(attempt=1, pids=(4,), failures=(failure(0),)).are_gone
    assert WorkersStatus(attempt=1, succeeded=True).are_gone
    assert WorkersStatus(attempt=1, stopped=()).are_gone


def test_all_that_is_new_in_one_status():
    """In an order in which it can have happened."""
    whole = WorkersStatus(
        attempt=1,
        pids=(4, 5),
        can_stay=True,
        failures=(failure(0),),
        has_saved=True,
        saved=7,
        stopped=(failure(1),),
    )
    kinds = [WorkersStarted, WorkersElastic, WorkersExited, WorkersCheckpointed, WorkersStopped]
    assert [type(event) for event in seen(whole)] == kinds
    assert seen(whole, whole) == seen(whole)


def test_failures_are_told_once():
    """The second status has the first failure too."""
    first = WorkersStatus(attempt=1, pids=(4,), failures=(failure(0),))
    events = seen(first, replace(first, failures=(failure(0), failure(1))))
    exits = [event for event in events if isinstance(event, WorkersExited)]
    assert [[one.rank for one in event.failures] for event in exits] == [[0], [1]]


def test_a_success_has_no_failures():
    assert seen(WorkersStatus(attempt=1, succeeded=True)) == [WorkersExited(at=10.0, attempt=1, node="a")]


def test_a_status_of_an_earlier_attempt_has_nothing_new():
    """It was overtaken by another one."""
    later = WorkersStatus(attempt=2, pids=(4,))
    assert seen(later, WorkersStatus(attempt=1, pids=(3,), succeeded=True)) == seen(later)


def test_a_later_attempt_begins_anew():
    """What was true of the attempt before says nothing."""
    first = WorkersStatus(attempt=1, pids=(3,), can_stay=True)
    assert [type(event) for event in seen(first, WorkersStatus(attempt=2, pids=(4,)))][2:] == [WorkersStarted]


HISTORY = (
    {"pids": (1, 2)},
    {"can_stay": True},
    {"failures": (failure(0),)},
    {"failures": (failure(0), failure(1))},
    {"succeeded": True},
    {"has_saved": True, "saved": 5},
    {"stopped": ()},
)


def course(changes):
    """Return the statuses of an attempt, as they can follow each other: not both a success and failures."""
    statuses = [WorkersStatus(attempt=1)]
    for change in changes:
        after = replace(statuses[-1], **change)
        is_growing = len(after.failures) >= len(statuses[-1].failures)
        if statuses[-1].stopped is None and is_growing and not (after.succeeded and after.failures):
            statuses.append(after)
    return statuses


@examples(200)
@given(st.lists(st.sampled_from(HISTORY), max_size=6), st.data())
def test_statuses_may_be_lost_or_come_twice(changes, data):
    """Whichever come, once or twice, if only the last one does: the same is known at the end."""
    statuses = course(changes)
    some = data.draw(st.lists(st.sampled_from(range(len(statuses))), max_size=9).map(sorted))
    received = [*(statuses[place] for place in some), statuses[-1]]

    def known(events):
        failures = [one for event in events if isinstance(event, WorkersExited) for one in event.failures]
        others = [event for event in events if not (isinstance(event, WorkersExited) and event.failures)]
        return failures, sorted(others, key=lambda event: type(event).__name__)

    assert known(seen(*received)) == known(seen(*statuses))


@examples(100)
@given(st.lists(st.sampled_from(HISTORY), min_size=1, max_size=6), st.data())
def test_the_machine_reaches_the_same_world(changes, data):
    """Whether it is told of each change, or only of some, it launches as many attempts, on the same nodes."""

    def final(statuses):
        machine = Machine(job(1, max_restarts=0))
        machine.start()
        machine.handle(joined("a", 1.0))
        old = NEW
        for new in statuses:
            for event in observe("a", old, new, now=2.0, sent_at=2.0):
                machine.handle(event)
            old = new
        return machine.phase, machine.attempt, machine.roster, machine.restarts

    statuses = course(changes)
    some = data.draw(st.lists(st.sampled_from(range(len(statuses))), max_size=9).map(sorted))
    assert final([*(statuses[place] for place in some), statuses[-1]]) == final(statuses)
