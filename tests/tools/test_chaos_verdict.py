"""What is said of an event log: it sees steps that a planned end lost, restarts that nobody may spend, other decisions."""

from __future__ import annotations

import pytest

from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import Event, NodeJoined, WorkersExited
from raylaunch.core.record import journal
from tools.chaos.check_steps import AttemptSteps
from tools.chaos.verdict import Blow, lost_commits, lost_copies, lost_steps, planned_ends, replayed

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
    lossless = [attempt_steps(1, 1, 9), attempt_steps(2, 10, 20), attempt_steps(4, 18, 30)]
    for in_memory in (False, True):
        assert list(lost_steps(lines, lossless, in_memory=in_memory)) == []
        assert list(lost_steps(lines, [attempt_steps(1, 1, 9), attempt_steps(3, 6, 20)], in_memory=in_memory)) == [
            "the planned end of attempt 1 lost 4 steps: step 6 is the next"
        ]


@pytest.mark.parametrize(
    ("gone", "in_memory", "is_wrong"),
    [("node-2", True, False), ("node-2", False, True), ("spare", True, True)],
)
def test_a_node_that_is_lost_after_a_planned_end(gone, in_memory, is_wrong):
    """It may take with it what its workers have saved, if that is in memory only. One without workers has nothing."""
    *before, lost = journey(gone, 50.0)
    lines = [*before, ASKED, line("WorkersCheckpointed", "Stop", 1, step=9), lost]
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 6, 20)]
    assert bool(list(lost_steps(lines, found, in_memory=in_memory))) == is_wrong


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


def steps_and_commits() -> tuple[list[AttemptSteps], dict[int, int]]:
    return [attempt_steps(1, 1, 9), attempt_steps(2, 8, 20)], {1: 8, 2: 20}


def journey(lost: str, at: float) -> list[dict[str, object]]:
    """Two nodes train in attempt 1; one of them is lost, and the other goes on."""
    joined = [
        {"event": {"is": "NodeJoined", "at": 1.0, "node": node, "address": address}, "actions": []}
        for node, address in (("node-1", "10.0.0.1"), ("node-2", "10.0.0.2"), ("spare", "10.0.0.3"))
    ]
    launch = {"is": "Launch", "attempt": 1, "roster": ["node-1", "node-2"]}
    again = {"is": "Launch", "attempt": 2, "roster": ["node-1"]}
    return [
        *joined,
        {"event": {"is": "Tick", "at": 2.0}, "actions": [launch]},
        {"event": {"is": "NodeLost", "at": at, "node": lost}, "actions": [again]},
    ]


@pytest.mark.parametrize(
    ("lost", "blows", "is_wrong"),
    [
        ("node-2", [Blow(at=48.0, address="10.0.0.2")], False),
        ("node-2", [], True),
        ("node-2", [Blow(at=48.0, address="10.0.0.1")], True),  # that host is still there
        ("node-2", [Blow(at=51.0, address="10.0.0.2")], True),  # it came later
        ("node-2", [Blow(at=3.0, address="10.0.0.2")], True),  # it came long before, and was survived
        ("spare", [Blow(at=48.0, address="10.0.0.3")], True),  # that node had no ranks
    ],
)
def test_a_committed_step_that_was_lost(lost, blows, is_wrong):
    """Only with a host of the world that was struck."""
    found = list(lost_commits(journey(lost, 50.0), *steps_and_commits(), blows))
    assert bool(found) == is_wrong
    if is_wrong:
        assert found[0].startswith("attempt 2 begins with step 8, and step 8 was committed in attempt 1")


def test_steps_that_were_not_committed_may_be_done_again():
    found, committed = steps_and_commits()
    assert list(lost_commits(journey("spare", 50.0), found, committed | {1: 7}, [])) == []


def test_what_was_lost_once_is_not_lost_again():
    """Attempt 3 goes on where attempt 2 began, which has committed nothing."""
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 5, 5), attempt_steps(3, 5, 20)]
    blows = [Blow(at=48.0, address="10.0.0.2")]
    assert list(lost_commits(journey("node-2", 50.0), found, {1: 8, 3: 20}, blows)) == []


def copies(steps: int, attempt: int) -> dict[str, object]:
    """The driver learns that all nodes have copied the commit after so many steps."""
    event = {"is": "Progressed", "at": 40.0, "attempt": attempt, "copied": steps}
    return {"event": event, "actions": []}


def ring(*gone: str, later: str = "") -> list[dict[str, object]]:
    """Four nodes train in attempt 1, and copy a commit; some are lost, and the others go on. `later`: lost afterwards."""
    nodes = ["node-1", "node-2", "node-3", "node-4"]
    joined = [
        {"event": {"is": "NodeJoined", "at": 1.0, "node": node, "address": f"10.0.0.{node[-1]}"}, "actions": []}
        for node in nodes
    ]
    again = {"is": "Launch", "attempt": 2, "roster": [node for node in nodes if node not in gone]}
    lost = [{"event": {"is": "NodeLost", "at": 50.0, "node": node}, "actions": []} for node in gone]
    after = [{"event": {"is": "NodeLost", "at": 51.0, "node": later}, "actions": []}] if later else []
    return [
        *joined,
        {"event": {"is": "Tick", "at": 2.0}, "actions": [{"is": "Launch", "attempt": 1, "roster": nodes}]},
        copies(7, 1),
        *lost,
        {"event": {"is": "Tick", "at": 50.0}, "actions": [again]},
        *after,
    ]


ALL_STRUCK = [Blow(at=48.0, address=f"10.0.0.{number}") for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("lines", "blows", "is_wrong"),
    [
        (ring("node-2"), ALL_STRUCK, True),
        (ring("node-2", "node-3"), ALL_STRUCK, False),
        (ring("node-4", "node-1"), ALL_STRUCK, False),  # the last one copies to the first one
        (ring("node-2", "node-4"), ALL_STRUCK, True),
        (ring("node-2", "node-3"), ALL_STRUCK[:2], True),  # of node-3, only the agent was killed
        (ring("node-2", later="node-3"), ALL_STRUCK, True),  # it was there when the state was restored
    ],
)
def test_a_copied_commit_that_was_lost(lines, blows, is_wrong):
    """Only with two neighbours."""
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 1, 20)]
    complaints = list(lost_copies(lines, found, blows))
    assert bool(complaints) == is_wrong
    if is_wrong:
        assert complaints[0].startswith(
            "attempt 2 begins with step 1, and step 7 was copied to other hosts in attempt 1"
        )


def test_steps_after_the_copied_commit_may_be_done_again():
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 8, 20)]
    assert list(lost_copies(ring("node-2"), found, ALL_STRUCK)) == []


@pytest.mark.parametrize("frees_memory", [False, True])
def test_a_node_that_has_left_may_have_freed_its_memory(frees_memory):
    """Then the loss of its neighbour may cost what was copied while it was there."""
    lines = ring("node-2")
    lines[-1]["actions"].append({"is": "Release", "node": "node-3", "frees_memory": frees_memory})
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 1, 20)]
    assert (list(lost_copies(lines, found, ALL_STRUCK[:2])) == []) == frees_memory


def test_a_copied_commit_that_was_lost_once_is_not_lost_again():
    found = [attempt_steps(1, 1, 9), attempt_steps(2, 1, 20), attempt_steps(3, 1, 20)]
    lines = ring("node-2", "node-3")
    lines.append(
        {"event": {"is": "Tick", "at": 60.0}, "actions": [{"is": "Launch", "attempt": 3, "roster": ["node-1"]}]}
    )
    assert list(lost_copies(lines, found, ALL_STRUCK)) == []
    lines.insert(-1, copies(9, 2))
    assert len(list(lost_copies(lines, found, ALL_STRUCK))) == 1
