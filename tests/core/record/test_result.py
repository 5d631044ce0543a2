"""The result of a run, computed from its journal alone."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from machine_helpers import (
    exited,
    failed,
    failure,
    finished,
    job,
    joined,
    lost,
    raised,
    replaced,
    started,
    stop_requested,
    stopped,
    tick,
)

from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Event, Progressed, Release, WorkersHung
from raylaunch.core.record import result as results
from raylaunch.core.record.attempt import MOST_FAILURES, MOST_STACKS, Attempt
from raylaunch.core.record.journal import JournalEntry, replay
from raylaunch.core.record.result import (
    FIRST_ATTEMPTS,
    LAST_ATTEMPTS,
    MOST_NODES,
    JobFailedError,
    RunResult,
    facts,
    result,
)


def result_of(a_job: Job, *events: Event) -> RunResult:
    """Return the result of a job with these events."""
    return result(replay(a_job, events), run_dir="/job/runs/night/1")


def test_finished_run():
    """One attempt, from launch to end; training time counts from when all workers were started."""
    found = result_of(job(1), joined("a", 2.0, address="10.0.0.7"), started("a", 3.0), finished("a", 10.0))
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


def test_restarted_run():
    """Each attempt has its times and failures; failures of restarted attempts are not the cause."""
    found = result_of(
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


def test_takeovers_are_counted():
    """They decide nothing: neither an attempt nor a restart is theirs."""
    found = result_of(
        job(1), joined("a"), replaced(1.0), started("a", 2.0), replaced(3.0, driver=3), finished("a", 4.0)
    )
    assert (found.takeovers, found.restarts, found.ok, found.why) == (2, 0, True, "all 2 workers finished")


def test_cause_of_a_failed_run():
    """The root cause among the failures of the last attempt, in whatever order they were reported."""
    peer_lost = raised("RuntimeError", "Connection reset by peer")
    nan = failure("b", 4.9, rank=3, **raised("ValueError", "NaN"))
    found = result_of(
        job(2),
        joined("a"),
        joined("b"),
        started("a", 1.0),
        started("b", 1.0),
        failed("a", 5.0, **peer_lost),
        stopped("b", 6.0, nan),
        stopped("a", 6.0),
    )
    assert found.exit_code == 1
    assert not found.ok
    assert found.cause == nan


def test_late_failures_belong_to_their_own_attempt():
    """They may be reported after the next attempt was launched."""
    nan = failure("b", 4.9, rank=3, **raised("ValueError", "NaN"))
    found = result_of(
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


def test_run_stopped_by_the_user_has_no_cause():
    """Even if workers failed during the stop."""
    found = result_of(
        job(1), joined("a"), started("a", 1.0), stop_requested("SIGINT", 5.0), failed("a", 6.0), stopped("a", 7.0)
    )
    assert (found.exit_code, found.cause, found.seconds) == (130, None, 7.0)
    assert found.attempts[0].ended_at == 5.0


def test_waiting_for_nodes_is_no_training_time():
    """An attempt ends when its nodes are lost, not when the next one is launched."""
    found = result_of(
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


def test_attempt_that_never_ran_has_no_training_time():
    found = result_of(job(2), joined("a"), joined("b"), started("a", 1.0), lost("b", 2.0), stopped("a", 3.0))
    assert found.attempts[0].running_at is None
    assert found.training_seconds == 0


def test_run_without_nodes():
    """No attempts, no cause, and a reason."""
    found = result_of(job(1), tick(300.0))
    assert (found.exit_code, found.why, found.attempts) == (3, "0 of 1 nodes after 300 s", ())
    assert (found.restarts, found.cause) == (0, None)


def test_truncated_journal():
    """The driver was killed: exit code 4, and the last attempt ends with the journal."""
    found = result_of(job(1), joined("a"), started("a", 1.0), joined("b", 50.0))
    assert (found.exit_code, found.why) == (4, "the run did not come to an end")
    assert found.attempts[0].ended_at == 50.0
    assert result([JournalEntry(event=None, actions=())]).attempts == ()


def test_result_has_the_start_time():
    assert result([], began="2026-01-01T00:00:00+00:00").began == "2026-01-01T00:00:00+00:00"


def test_ranks_without_a_failure():
    """They ended with exit code 0, unless a node was lost."""
    peer_lost = failed("a", 5.0, **raised("RuntimeError", "Connection reset by peer"))
    begun = (joined("a"), joined("b"), started("a", 1.0), started("b", 1.0))
    (attempt,) = result_of(
        job(2), *begun, peer_lost, stopped("b", 6.0, failure("b", 6.0, rank=2)), stopped("a", 6.0)
    ).attempts
    assert (attempt.world_size, attempt.unheard, attempt.lost) == (4, (0, 3), ())
    (attempt,) = result_of(job(2), *begun, peer_lost, lost("b", 5.5), stopped("a", 6.0)).attempts
    assert (attempt.unheard, attempt.lost) == ((), ("b",))


def test_nodes_lost_before_any_attempt():
    """They belong to no attempt."""
    assert result_of(job(2), joined("a"), lost("a", 1.0)).attempts == ()


def test_facts_of_a_failed_run():
    """The facts contain the result as JSON, and what the report computes from it."""
    stopped_by_us = failure("a", 6.0, rank=0, exit_code=-15, stopped=True)
    same = failure("a", 5.5, rank=2)
    found = result_of(job(1), joined("a"), started("a", 1.0), failed("a", 5.0), stopped("a", 6.0, stopped_by_us, same))
    document = json.loads(json.dumps(facts(found)))
    assert document["cause"]["rank"] == 1
    assert (document["cause"]["what"], document["cause"]["signal"]) == ("was killed by SIGKILL", "SIGKILL")
    assert document["alike"] == [2]
    assert document["consequences"] == [{"what": "stopped by raylaunch (SIGTERM)", "ranks": [0]}]
    assert document["hints"] == list(found.hints)
    assert len(found.hints) == 1


def test_facts_of_a_run_without_cause():
    """They contain the fields of the result and the lost steps only."""
    found = result_of(job(1), tick(300.0))
    assert found.hints == ()
    assert facts(found) == dataclasses.asdict(found) | {"resume": "yes", "lost_steps": 0}


@pytest.mark.parametrize(
    ("code", "answer"),
    [(0, "no"), (1, "yes"), (3, "yes"), (4, "pointless"), (75, "yes"), (93, "pointless"), (143, "yes")],
)
def test_whether_to_start_a_run_again(code, answer):
    found = dataclasses.replace(result_of(job(1), tick(300.0)), exit_code=code)
    assert facts(found)["resume"] == answer


def test_failure_that_would_come_again_has_a_cause():
    """The run ends with a code of its own, and the error that programs get has it too."""
    broken = failure("a", 5.0, **raised("ImportError", "no torchvision"))
    found = result_of(
        job(1, max_restarts=3), joined("a"), started("a", 1.0), exited("a", 5.0, broken), stopped("a", 6.0)
    )
    assert (found.exit_code, found.cause) == (93, broken)
    assert JobFailedError("it failed", result=found).exit_code == 93


def progressed(at: float, attempt: int, marks: int, low: int | None, **known) -> Progressed:
    known = {"high": low, "marked": at} | known
    return Progressed(at=at, attempt=attempt, marks=marks, low=low, **known)


def test_steps_and_time_lost_by_restarts():
    """For each attempt: its steps, those it did again, and the pause before its first step."""
    found = result_of(
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
    """The lost steps are unknown."""
    found = result_of(
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


def test_hang_and_end_of_a_worker_are_one_failure():
    """The hang gets the process id and the files that were reported when the worker ended."""
    hang = failure("a", 9.0, pid=0, **SILENT)
    exit_failure = failure(
        "a", 12.5, pid=4242, stopped=True, stderr="/runs/rank-1/stderr.log", host="gpu-1", exit_code=-15
    )
    other = failure("a", 12.5, rank=0, stopped=True)
    found = result_of(
        job(1),
        joined("a"),
        started("a", 1.0),
        WorkersHung(at=12.0, attempt=1, failures=(hang,), groups=GROUPS),
        stopped("a", 13.0, exit_failure, other),
    )
    assert found.cause is not None
    assert (found.cause.at, found.cause.stopped, found.cause.exit_code) == (9.0, False, -15)
    assert (found.cause.pid, found.cause.stderr, found.cause.host) == (4242, "/runs/rank-1/stderr.log", "gpu-1")
    assert found.cause.what == hang.what
    assert found.attempts[0].failures == (found.cause, other)
    assert found.attempts[0].stacks == GROUPS
    assert "`hang_timeout`" in found.hints[0]
    assert json.loads(json.dumps(facts(found)))["attempts"][0]["stacks"][0]["ranks"] == [1]


def test_hang_without_the_end_of_the_worker():
    """If the end is not reported, the failure is the hang alone. Hangs of unknown attempts are ignored."""
    hang = failure("a", 9.0, **SILENT)
    other_attempt = WorkersHung(at=12.0, attempt=9, failures=(hang,))
    found = result_of(
        job(1), joined("a"), started("a", 1.0), other_attempt, WorkersHung(at=12.0, attempt=1, failures=(hang,))
    )
    assert found.attempts[0].failures == (hang,)


# Runs with many attempts.

MANY = {"max_restarts": 10_000, "exclude_after": 0}


def killed_again_and_again(attempts: int, *, first_step: int = 0) -> list[Event]:
    """Return the events of a run in which each attempt but the last fails after 10 s. Each makes steps from there on."""
    events: list[Event] = [joined("a")]
    for number in range(1, attempts + 1):
        at = 10.0 * number
        events.append(started("a", at + 1.0, attempt=number))
        if number >= first_step:
            low = 4 * number
            events.append(progressed(at + 2.0, number, 1, low))
            events.append(progressed(at + 8.0, number, 9, low + 8, marked=at + 8.0))
        last = number == attempts
        events.append((finished if last else failed)("a", at + 9.0, attempt=number))
    return events


@pytest.mark.parametrize("first_step", [0, 10, 50])
def test_of_many_attempts_those_in_the_middle_are_summed_up(monkeypatch, first_step):
    """The numbers that concern the whole run are those that all attempts give."""
    events = killed_again_and_again(250, first_step=first_step)
    found = result_of(job(1, **MANY), *events)
    monkeypatch.setattr(results, "LAST_ATTEMPTS", 1000)
    whole = result_of(job(1, **MANY), *events)
    assert whole.omitted is None
    assert found.attempts == whole.attempts[:FIRST_ATTEMPTS] + whole.attempts[-LAST_ATTEMPTS:]
    assert found.omitted is not None
    assert (found.omitted.first, found.omitted.last, found.omitted.count) == (21, 170, 150)
    assert (found.restarts, found.seconds, found.why) == (whole.restarts, whole.seconds, whole.why)
    assert found.training_seconds == pytest.approx(whole.training_seconds)
    assert found.lost_steps == whole.lost_steps > 0


def test_result_json_says_which_attempts_it_omits():
    """And which file has them."""
    document = json.loads(json.dumps(facts(result_of(job(1, **MANY), *killed_again_and_again(150)))))
    assert document["restarts"] == 149
    assert [document["omitted"][key] for key in ("first", "last", "where")] == [21, 70, "events.jsonl"]
    assert facts(result_of(job(1, **MANY), *killed_again_and_again(100)))["omitted"] is None


def test_failures_of_earlier_attempts_are_limited():
    """An attempt that is followed by two others keeps its root cause and a few others, the last ones keep all."""
    ranks = range(2 * MOST_FAILURES)
    groups = tuple(StackGroup(ranks=(rank,), frames=(f"/job/train.py:{rank} in main",)) for rank in ranks)
    events: list[Event] = [joined("a")]
    for number in range(1, 5):
        failures = [failure("a", 9.0 - rank, rank=rank, attempt=number) for rank in ranks]
        events += [
            started("a", number, attempt=number),
            *(exited("a", number, one, attempt=number) for one in failures),
        ]
    hung = WorkersHung(at=1.0, attempt=1, failures=(), groups=groups)
    late = stopped("a", 5.0, failure("a", 9.0, rank=1, attempt=1), attempt=1)
    found = result_of(job(1, **MANY), *events[:2], hung, *events[2:], late)
    first, second, third, fourth = found.attempts[:4]
    assert [one.rank for one in second.failures] == [ranks[-1], *range(MOST_FAILURES - 1)]
    assert (second.omitted_failures, second.unheard) == (MOST_FAILURES, ())
    assert [len(one.failures) for one in (third, fourth)] == [MOST_FAILURES, len(ranks)]
    assert first.omitted_failures == MOST_FAILURES + 1
    assert (first.stacks, first.omitted_stacks) == (groups[:MOST_STACKS], len(ranks) - MOST_STACKS)


def test_few_late_failures_are_not_limited():
    """Those of an attempt long ago are added in the order in which they came."""
    events = killed_again_and_again(4)
    late = failure("a", 9.0, rank=0, attempt=1)
    found = result_of(job(1, **MANY), *events[:-1], stopped("a", 50.0, late, attempt=1), events[-1])
    assert [one.rank for one in found.attempts[0].failures] == [1, 0]
    assert found.attempts[0].omitted_failures == 0


def test_addresses_of_nodes_that_are_long_gone_are_forgotten():
    """Those that are there, or took part in an attempt that the result has, are named."""
    events: list[Event] = [joined("a"), started("a", 1.0)]
    for number in range(3 * MOST_NODES):
        events += [joined(f"n{number}", 2.0), lost(f"n{number}", 3.0)]
    entries = replay(job(1), [*events, joined("b", 4.0)])
    released = Release(node="c", why="its host is left out")
    entries.insert(2, JournalEntry(event=joined("c"), actions=(released,)))
    found = result(entries)
    assert {"a", "b", f"n{3 * MOST_NODES - 1}"} <= found.addresses.keys()
    assert "c" not in found.addresses
    assert len(found.addresses) <= MOST_NODES


def test_what_a_failed_job_tells():
    """Also after a way through another process, as in a pool."""
    events = joined("a", address="10.0.0.7"), started("a", 1.0), failed("a", 2.0), stopped("a", 3.0)
    told = result_of(job(1, max_restarts=0), *events)
    error = JobFailedError("it failed", hint="look", result=told)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.rank, one.node, one.run_dir, one.result) == (1, "a", "/job/runs/night/1", told)
        assert (str(one), one.exit_code) == ("it failed\nhint: look", 1)
    error = JobFailedError("it failed", result=dataclasses.replace(told, cause=None))
    assert (error.rank, error.node) == (None, None)
