"""torchelastic's events: torch can read them, and they give the state of each worker."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import Mock

from raylaunch.cli.output.event_log import EventLog
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    NodeJoined,
    StopRequested,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.placement.plan import make_plan
from raylaunch.core.record.journal import JournalEntry


def events_of(*events, **settings):
    """Return the events that are written while a machine handles these events."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, run_id="night", **settings)
    machine, lines = Machine(job), []
    log = EventLog(Mock(), lines.append)
    log.on_plan(job, make_plan(job, (), local=True), "")
    machine.start()
    for event in events:
        log.on_entry(JournalEntry(event=event, actions=tuple(machine.handle(event))), machine)
    return [json.loads(line) for line in lines]


def joined(*nodes):
    return [NodeJoined(at=0.0, node=node, address=f"10.0.0.{at}", nproc=2) for at, node in enumerate(nodes, 1)]


def of(events, source):
    return [
        (event["metadata"]["global_rank"], event["metadata"]["state"]) for event in events if event["source"] == source
    ]


STARTED = [WorkersStarted(at=1.0, attempt=1, node=node) for node in ("a", "b")]
FAILURE = Failure(
    attempt=1, node="b", rank=3, local_rank=1, pid=7, at=2.0, exit_code=1,
    error=WorkerError(type="ValueError", message="no", traceback=""),
)  # fmt: skip


def test_all_workers_succeed():
    """There is one event per node at the start, and one per worker and per node at the end."""
    ends = [WorkersExited(at=2.0, attempt=1, node=node) for node in ("a", "b")]
    events = events_of(*joined("a", "b"), *STARTED, *ends, role="trainer")
    assert of(events, "WORKER") == [(rank, "SUCCEEDED") for rank in range(4)]
    assert of(events, "AGENT") == [(None, "START")] * 2 + [(None, "SUCCEEDED")] * 2
    assert {event["metadata"]["role"] for event in events} == {"trainer"}
    assert {event["metadata"]["run_id"] for event in events} == {"night"}


def test_a_failed_worker_and_stopped_workers():
    """As with torchrun, the failed worker is FAILED with its error, and the others are TERMINATED."""
    ends = [WorkersStopped(at=3.0, attempt=1, node=node) for node in ("a", "b")]
    events = events_of(
        *joined("a", "b"), *STARTED, WorkersExited(at=2.0, attempt=1, node="b", failures=(FAILURE,)), *ends
    )
    assert of(events, "WORKER") == [(0, "TERMINATED"), (1, "TERMINATED"), (2, "TERMINATED"), (3, "FAILED")]
    failed = next(event for event in events if event["metadata"]["global_rank"] == 3)
    assert json.loads(failed["metadata"]["raw_error"]) == {"message": "no"}
    assert json.loads(failed["metadata"]["metadata"])["exit_code"] == [1]


def test_a_worker_that_hung():
    """A worker that hung is FAILED, although it was stopped like the others."""
    hung = Failure(attempt=1, node="b", rank=3, local_rank=1, pid=0, at=2.0, exit_code=-9, hung="no step for 5.0 s")
    ended = [replace(hung, node=node, rank=rank, hung="", stopped=True) for node, rank in (("a", 0), ("b", 3))]
    ends = [WorkersStopped(at=3.0, attempt=1, node=end.node, failures=(end,)) for end in ended]
    events = events_of(*joined("a", "b"), *STARTED, WorkersHung(at=2.0, attempt=1, failures=(hung,)), *ends)
    assert of(events, "WORKER") == [(0, "TERMINATED"), (1, "TERMINATED"), (2, "TERMINATED"), (3, "FAILED")]


def test_nothing_was_started():
    """A run that was stopped before workers started writes no events."""
    assert events_of(StopRequested(at=1.0, signal="SIGINT")) == []


def test_torch_reads_them_back():
    """The fields are those of `torch.distributed.elastic.events.Event`."""
    from torch.distributed.elastic.events import Event

    ends = [WorkersExited(at=2.0, attempt=1, node=node) for node in ("a", "b")]
    for event in events_of(*joined("a", "b"), *STARTED, *ends):
        assert Event.deserialize(json.dumps(event)).name.startswith("torchelastic.worker.status.")
