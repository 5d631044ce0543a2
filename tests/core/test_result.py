"""What came of a run, read from its log alone."""

from __future__ import annotations

import dataclasses
import json

from story import (
    asked,
    draining,
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

from raylaunch.core.events import Event
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry, replay
from raylaunch.core.result import Attempt, RunResult, facts, result


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
    found = of(job(2), joined("a"), joined("b"), started("a", 1.0), draining("b", 2.0), started("b", 3.0))
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
    assert facts(found) == dataclasses.asdict(found)
