"""What is said of an event log: it sees steps that a planned end lost, restarts that nobody may spend, other decisions."""

from __future__ import annotations

import pytest

from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import Event, NodeJoined, WorkersExited
from raylaunch.core.record import journal
from tests.chaos.check_steps import AttemptSteps
from tests.chaos.verdict import lost_steps, planned_ends, replayed

JOB = Job(entrypoint=Entrypoint(script="train.py"), nnodes=1, max_restarts=9)


def attempt_steps(attempt: int, first: int, last: int) -> AttemptSteps:
    return AttemptSteps(attempt=attempt, size=2, first=first, last=last, began=0, ended=0, trained=0, lost=0, pause=0.0)


def line(event: str, order: str, attempt: int, **facts: object) -> dict[str, object]:
    return {"event": {"is": event} | facts, "actions": [{"is": order, "attempt": attempt}]}


ASKED = line("Tick", "RequestCheckpoint", 1)


@pytest.mark.parametrize(
    ("stop", "planned"),
    [
        (line("WorkersCheckpointed", "Stop", 1, step=9), {1}),
        (line("WorkersCheckpointed", "Stop", 1, step=None), {1}),  # a script that cannot is no excuse here
        (line("Tick", "Stop", 1), {1}),  # nor is one that does not in time
        (line("NodeLost", "Stop", 1), set()),
        (line("WorkersHung", "Stop", 1), set()),
        (line("WorkersExited", "Stop", 1, failures=[{}]), set()),
        (line("WorkersExited", "Stop", 1, failures=[]), {1}),
        (line("Tick", "Stop", 2), set()),
    ],
)
def test_whose_end_was_planned(stop, planned):
    """All that were asked to save, and were not hit by anything else meanwhile."""
    assert planned_ends([ASKED, stop]) == planned


def test_a_planned_end_that_lost_steps():
    """None may be; others may."""
    lines = [ASKED, line("WorkersCheckpointed", "Stop", 1, step=9)]
    assert list(lost_steps(lines, [attempt_steps(1, 1, 9), attempt_steps(2, 10, 20), attempt_steps(4, 18, 30)])) == []
    assert list(lost_steps(lines, [attempt_steps(1, 1, 9), attempt_steps(3, 6, 20)])) == [
        "the planned end of attempt 1 lost 4 steps: step 6 is the next"
    ]


def test_a_log_that_was_decided_otherwise_or_spent_too_much(tmp_path):
    """Both are told."""
    death = Failure(attempt=1, node="a", rank=0, local_rank=0, pid=7, at=2.0, exit_code=-9)
    events: list[Event] = [
        NodeJoined(at=1.0, node="a", address="10.0.0.1", nproc=1, host="h"),
        WorkersExited(at=2.0, attempt=1, node="a", failures=(death,)),
    ]
    entries = [journal.line(entry) for entry in journal.replay(JOB, events)]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join([journal.header(JOB, "2026-01-01"), *entries]))
    assert list(replayed(log, 1)) == []
    assert list(replayed(log, 0)) == ["1 restarts are spent, for 0 faults that may take one"]
    log.write_text(log.read_text().replace('"roster": ["a"]', '"roster": ["b"]'))
    assert "does not lead to the decision" in next(replayed(log, 1))
