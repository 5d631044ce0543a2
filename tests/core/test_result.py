"""What came of a run, read from its log alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
from story import (
    asked,
    failed,
    failure,
    finished,
    job,
    joined,
    lost,
    raised,
    started,
    stopped,
    tick,
)

from raylaunch.core.events import Event, Progressed, WorkersHung
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry, replay
from raylaunch.core.result import Attempt, RunResult, facts, result
from raylaunch.core.stacks import StackGroup


def of(a_job: Job, *events: Event) -> RunResult:
    return result(replay(a_job, events), run_dir="/job/runs/night/1")


def test_a_run_that_finishes():
    """One attempt, from its launch to its end; training counts from the time all workers are up."""
    found = of(job(1), joined("a", 2.0, address="10.0.0.7"), started("a", 3.0), finished("a", 10.0))
    assert found == RunResult(
        exit_code=0,
        why="all 2 workers finished",
        seconds=10.0,
        restarts=0,
        attempts=(
            Attempt(
                number=1,
                roster=("a",),
                launched_at=2.0,
                running_at=3.0,
                ended_at=10.0,
                why_launched="1 of 1 nodes; a joined",
                why_ended="",
                failures=(),
                world_size=2,
            ),
        ),
        cause=None,
        addresses={"a": "10.0.0.7"},
        run_dir="/job/runs/night/1",
    )
    assert found.ok
    assert found.training_seconds == 7.0


def test_a_run_that_restarts():
    """Each attempt has its times and its failures; those of attempts that were overcome are no cause."""
    found = of(
        job(1, max_restarts=1),
        joined("a", 1.0),
        started("a", 2.0),
        failed("a", 5.0),
        started("a", 6.0, attempt=2),
        finished("a", 9.0, attempt=2),
    )
    assert [(a.launched_at, a.running_at, a.ended_at) for a in found.attempts] == [(1.0, 2.0, 5.0), (5.0, 6.0, 9.0)]
    assert [len(a.failures) for a in found.attempts] == [1, 0]
    assert found.attempts[0].why_ended == "rank 1 on a was killed by SIGKILL; restart 1 of 1"
    assert (found.restarts, found.cause, found.training_seconds) == (1, None, 6.0)


def test_the_cause_of_a_failed_run():
    """The root cause among the failures of the last attempt, whoever was heard first."""
    echo = raised("RuntimeError", "Connection reset by peer")
    nan = failure("b", 4.9, rank=3, **raised("ValueError", "NaN"))
    found = of(
        job(2),
        joined("a"),
        joined("b"),
        started("a", 1.0),
        started("b", 1.0),
        failed("a", 5.0, **echo),
        stopped("b", 6.0, nan),
        stopped("a", 6.0),
    )
    assert found.exit_code == 1
    assert not found.ok
    assert found.cause == nan


def test_late_failures_count_under_their_own_attempt():
    """The machine has gone on by then; the report still knows why the first attempt ended."""
    nan = failure("b", 4.9, rank=3, **raised("ValueError", "NaN"))
    found = of(
        job(2, max_restarts=1),
        joined("a"),
        joined("b"),
        failed("a", 5.0),
        stopped("b", 6.0, nan),
        failed("b", 7.0, attempt=9),
    )
    first, second = found.attempts
    assert nan in first.failures
    assert second.failures == ()


def test_workers_are_not_at_fault_when_a_person_stops_them():
    """There is no cause, even where workers failed on the way."""
    found = of(job(1), joined("a"), started("a", 1.0), asked("SIGINT", 5.0), failed("a", 6.0), stopped("a", 7.0))
    assert (found.exit_code, found.cause, found.seconds) == (130, None, 7.0)
    assert found.attempts[0].ended_at == 5.0


def test_waiting_for_nodes_is_no_training():
    """Where all nodes are lost, the attempt ends then, not when others come."""
    found = of(
        job(1),
        joined("a"),
        started("a", 1.0),
        lost("a", 11.0),
        joined("b", 400.0),
        started("b", 401.0, attempt=2),
        finished("b", 406.0, attempt=2),
    )
    assert found.training_seconds == 15.0
    assert set(found.addresses) == {"a", "b"}


def test_an_attempt_that_never_ran():
    """It has no time of training."""
    found = of(job(2), joined("a"), joined("b"), started("a", 1.0), lost("b", 2.0), stopped("a", 3.0))
    assert found.attempts[0].running_at is None
    assert found.training_seconds == 0


def test_the_cluster_gave_nothing():
    """No attempts, no cause, and the reason in words."""
    found = of(job(1), tick(300.0))
    assert (found.exit_code, found.why, found.attempts) == (3, "0 of 1 nodes after 300 s", ())
    assert (found.restarts, found.cause) == (0, None)


def test_a_log_that_breaks_off():
    """The driver was killed: our own fault, and the last attempt ends with the log."""
    found = of(job(1), joined("a"), started("a", 1.0), joined("b", 50.0))
    assert (found.exit_code, found.why) == (4, "the run did not come to an end")
    assert found.attempts[0].ended_at == 50.0
    assert result([Entry(event=None, actions=())]).attempts == ()


def test_times_can_be_told_by_the_clock():
    """The result knows when the run began."""
    assert result([], began="2026-01-01T00:00:00+00:00").began == "2026-01-01T00:00:00+00:00"


def test_ranks_of_which_no_failure_is_known():
    """They ended with exit code 0; where a node was lost, nobody knows how its ranks ended."""
    echo = failed("a", 5.0, **raised("RuntimeError", "Connection reset by peer"))
    begun = (joined("a"), joined("b"), started("a", 1.0), started("b", 1.0))
    (attempt,) = of(job(2), *begun, echo, stopped("b", 6.0, failure("b", 6.0, rank=2)), stopped("a", 6.0)).attempts
    assert (attempt.world_size, attempt.unheard, attempt.lost) == (4, (0, 3), ())
    (attempt,) = of(job(2), *begun, echo, lost("b", 5.5), stopped("a", 6.0)).attempts
    assert (attempt.unheard, attempt.lost) == ((), ("b",))


def test_nodes_that_are_lost_before_any_attempt_are_nobodys():
    """There is no attempt that they could be missing from."""
    assert of(job(2), joined("a"), lost("a", 1.0)).attempts == ()


def test_the_facts_of_a_failed_run():
    """All of the result, as JSON can hold it, and what the report says in words."""
    ours = failure("a", 6.0, rank=0, exit_code=-15, stopped=True)
    same = failure("a", 5.5, rank=2)
    found = of(job(1), joined("a"), started("a", 1.0), failed("a", 5.0), stopped("a", 6.0, ours, same))
    told = json.loads(json.dumps(facts(found)))
    assert told["cause"]["rank"] == 1
    assert (told["cause"]["what"], told["cause"]["signal"]) == ("was killed by SIGKILL", "SIGKILL")
    assert told["alike"] == [2]
    assert told["consequences"] == [{"what": "stopped by raylaunch (SIGTERM)", "ranks": [0]}]
    assert told["hints"] == list(found.hints)
    assert len(found.hints) == 1


def test_the_facts_of_a_run_without_a_cause():
    """There is nothing to say beyond the result."""
    found = of(job(1), tick(300.0))
    assert found.hints == ()
    assert facts(found) == dataclasses.asdict(found) | {"lost_steps": 0}


def progressed(at: float, attempt: int, marks: int, low: int | None, **known) -> Progressed:
    known = {"high": low, "marked": at} | known
    return Progressed(at=at, attempt=attempt, marks=marks, low=low, **known)


def test_what_restarts_cost():
    """Of each attempt its steps, those it did again, and how long no world made any."""
    found = of(
        job(1, max_restarts=3),
        joined("a"),
        started("a", 1.0),
        progressed(2.0, 1, 1, 0),
        progressed(60.0, 1, 41, 39, high=40, marked=59.9),
        failed("a", 60.0),
        started("a", 61.0, attempt=2),
        failed("a", 62.0, attempt=2),
        started("a", 63.0, attempt=3),
        progressed(64.0, 3, 1, 31, marked=63.9),
        finished("a", 70.0, attempt=3),
    )
    first, second, third = found.attempts
    assert (first.steps, first.first_step, first.last_step) == (41, 0, 40)
    assert (first.lost_steps, first.pause) == (None, None)
    assert (second.steps, second.first_step, second.last_step) == (0, None, None)
    assert (second.lost_steps, second.pause) == (None, None)
    assert (third.first_step, third.lost_steps) == (31, 10)
    assert third.pause == pytest.approx(4.0)
    assert (found.lost_steps, facts(found)["lost_steps"]) == (10, 10)


def test_steps_without_numbers_are_counted():
    """What was lost is not known then."""
    found = of(
        job(1, max_restarts=1),
        joined("a"),
        started("a", 1.0),
        progressed(2.0, 1, 7, None),
        failed("a", 3.0),
        started("a", 4.0, attempt=2),
        progressed(5.0, 2, 1, None),
        progressed(5.0, 9, 1, None),
        finished("a", 9.0, attempt=2),
    )
    assert [attempt.steps for attempt in found.attempts] == [7, 1]
    assert [attempt.lost_steps for attempt in found.attempts] == [None, None]
    assert found.attempts[1].pause == pytest.approx(3.0)


SILENT = {"exit_code": -9, "hung": "no step for 2.1 s, at train.py:33 in fetch", "hung_at": "/job/train.py:33"}
GROUPS = (
    StackGroup(ranks=(1,), frames=("/job/train.py:33 in fetch",)),
    StackGroup(ranks=(0,), frames=("/job/train.py:41 in main",)),
)


def test_a_hang_is_told_once():
    """What is known of the worker's end is added to it: its process and its files."""
    silent = failure("a", 9.0, pid=0, **SILENT)
    end = failure("a", 12.5, pid=4242, stopped=True, stderr="/runs/rank-1/stderr.log", host="gpu-1", exit_code=-15)
    other = failure("a", 12.5, rank=0, stopped=True)
    found = of(
        job(1),
        joined("a"),
        started("a", 1.0),
        WorkersHung(at=12.0, attempt=1, failures=(silent,), groups=GROUPS),
        stopped("a", 13.0, end, other),
    )
    assert found.cause is not None
    assert (found.cause.at, found.cause.stopped, found.cause.exit_code) == (9.0, False, -15)
    assert (found.cause.pid, found.cause.stderr, found.cause.host) == (4242, "/runs/rank-1/stderr.log", "gpu-1")
    assert found.cause.what == silent.what
    assert found.attempts[0].failures == (found.cause, other)
    assert found.attempts[0].stacks == GROUPS
    assert "`hang_timeout`" in found.hints[0]
    assert json.loads(json.dumps(facts(found)))["attempts"][0]["stacks"][0]["ranks"] == [1]


def test_a_hang_of_a_worker_whose_end_was_not_told():
    """Its node was lost, or the log breaks off: it is known as it was found; and only of attempts there were."""
    silent = failure("a", 9.0, **SILENT)
    of_another = WorkersHung(at=12.0, attempt=9, failures=(silent,))
    found = of(job(1), joined("a"), started("a", 1.0), of_another, WorkersHung(at=12.0, attempt=1, failures=(silent,)))
    assert found.attempts[0].failures == (silent,)
