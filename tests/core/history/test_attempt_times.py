"""When each attempt did what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_helpers import checkpointed, exited, failed, finished, hung, joined, lost, started, stopped
from written_journal import beginning, entry, launch, steps, stop

from raylaunch.core.history.attempt_times import AttemptTimes, Interruption, TimesBuilder
from raylaunch.core.machine.events_and_actions import Release, RequestCheckpoint, RestartRequested
from raylaunch.core.record.journal import JournalEntry


def times(*entries: JournalEntry) -> list[AttemptTimes]:
    builder = TimesBuilder()
    for each in entries:
        builder.add(each)
    return builder.attempts


def test_an_attempt_from_launch_to_end():
    """Each time is noted once, when the last node has answered."""
    first, second = times(
        *beginning("a", "b"),
        entry(started("a", 2.1)),
        entry(started("b", 2.5)),
        entry(steps(4.0, 1)),
        entry(steps(9.0, 51)),
        entry(failed("a", 9.5), stop(1, "a", "b"), launch(2, "a", "b", why="restart 1 of 3")),
        entry(started("a", 9.6, attempt=2)),
        entry(started("b", 9.7, attempt=2)),
        entry(steps(10.0, 1, attempt=2, high=40)),
    )
    assert (first.launched_at, first.running_at, first.first_step_at, first.last_step_at) == (2.0, 2.5, 4.0, 9.0)
    assert (first.ended_at, first.stopped_at, first.interruption) == (9.5, None, Interruption.FAILURE)
    assert (first.workers, first.steps, first.first_step, first.last_step, first.lost_steps) == (4, 51, 0, 50, 11)
    assert (second.why, second.running_at, second.ended_at, second.interruption) == ("restart 1 of 3", 9.7, None, "")
    assert str(second) == "attempt 2"


def test_steps_may_have_no_numbers():
    """Then nobody knows how many were lost."""
    first, _ = times(
        *beginning("a"),
        entry(steps(4.0, 1)),
        entry(failed("a", 9.5), stop(1, "a"), launch(2, "a")),
        entry(steps(10.0, 1, attempt=2)),
        entry(steps(10.0, 1, attempt=1)),
    )
    assert first.lost_steps == 1
    assert first.steps == 1, "a late report is of another attempt"


@pytest.mark.parametrize(
    ("entries", "interruption"),
    [
        ([entry(failed("a", 5.0), stop(1, "a", "b"))], Interruption.FAILURE),
        ([entry(hung("a", 5.0), stop(1, "a", "b"))], Interruption.HANG),
        ([entry(lost("b", 5.0), stop(1, "a"))], Interruption.NODE_LOST),
        ([entry(failed("a", 4.0)), entry(lost("b", 5.0), stop(1, "a"))], Interruption.NODE_LOST),
        ([entry(joined("c", 5.0), stop(1, "a", "b"))], Interruption.RESIZE),
        ([entry(RestartRequested(at=5.0, by="ana", save_seconds=0.0), stop(1, "a", "b"))], Interruption.REQUEST),
        ([entry(joined("c", 5.0), stop(1, "a", "b")), entry(lost("b", 6.0))], Interruption.RESIZE),
        ([entry(joined("c", 5.0), stop(1, "a", "b")), entry(failed("b", 6.0))], Interruption.RESIZE),
        ([entry(finished("a", 5.0), stop(1, "a", "b"))], Interruption.RESIZE),
        ([entry(lost("unknown", 5.0)), entry(joined("c", 5.0))], Interruption.RESIZE),
    ],
)
def test_what_ended_an_attempt(entries, interruption):
    """What came before the decision counts, and of several things the most serious."""
    first, _ = times(*beginning("a", "b"), *entries, entry(started("a", 7.0), launch(2, "a")))
    assert first.interruption is interruption
    assert first.ended_at == (5.0 if entries[0].actions or entries[-1].actions else 7.0)


def test_workers_that_stay():
    """They are counted over all nodes of the attempt."""
    begun = [entry(replace(started(node, 6.0, attempt=2), stayed=stayed)) for node, stayed in (("a", 2), ("b", 1))]
    first, second = times(*beginning("a", "b"), entry(failed("a", 5.0), launch(2, "a", "b")), *begun)
    assert (first.stayed, second.stayed) == (0, 3)


def test_a_run_that_is_stopped():
    """There is no attempt after the last one."""
    (only,) = times(*beginning("a"), entry(stopped("b", 3.0), stop(1, "a", why="SIGTERM")), entry(stopped("a", 4.0)))
    assert (only.interruption, only.why_ended, only.stopped_at) == (Interruption.STOP, "SIGTERM", 4.0)


def test_processes_are_gone_when_the_last_node_has_said_so():
    """Or is gone itself, or was given up."""
    resize = [
        entry(joined("d", 5.0), RequestCheckpoint(attempt=1, nodes=("a", "b", "c"), why="d joined")),
        entry(checkpointed("a", 6.0), stop(1, "a", "b", "c")),
        entry(stopped("a", 6.5)),
        entry(lost("b", 7.0)),
        entry(exited("c", 7.5), Release(node="c", why="no answer")),
    ]
    (only,) = times(*beginning("a", "b", "c"), *resize)
    assert (only.saving_at, only.ended_at, only.stopped_at) == (5.0, 6.0, 7.5)


def test_a_journal_without_an_attempt():
    """Nothing is noted, whatever comes."""
    request = RequestCheckpoint(attempt=1, nodes=("a",), why="d joined")
    assert times(entry(None), entry(lost("a", 1.0), stop(1, "a"), request), entry(steps(2.0, 1))) == []
