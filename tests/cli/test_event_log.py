"""torchelastic's events: torch itself reads them back, and they say what came of each worker."""

from __future__ import annotations

import json
from dataclasses import replace

from raylaunch.cli.event_log import EventLog
from raylaunch.core.events import NodeJoined, StopAsked, WorkersExited, WorkersHung, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from tests.fakes import Notebook


def told(*events, **settings):
    """What is written while a machine is told this."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, run_id="night", **settings)
    machine, lines, book = Machine(job), [], Notebook()
    log = EventLog(book, lines.append)
    log.planned = None  # needs a plan, and adds nothing
    log._run_id = "night"
    machine.start()
    for event in events:
        log.decided(Entry(event=event, actions=tuple(machine.handle(event))), machine)
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
    """A start per node, then each worker and each node."""
    ends = [WorkersExited(at=2.0, attempt=1, node=node) for node in ("a", "b")]
    events = told(*joined("a", "b"), *STARTED, *ends, role="trainer")
    assert of(events, "WORKER") == [(rank, "SUCCEEDED") for rank in range(4)]
    assert of(events, "AGENT") == [(None, "START")] * 2 + [(None, "SUCCEEDED")] * 2
    assert {event["metadata"]["role"] for event in events} == {"trainer"}
    assert {event["metadata"]["run_id"] for event in events} == {"night"}


def test_the_one_that_failed_and_those_that_were_ended():
    """As torchrun tells them apart: FAILED with its error, TERMINATED the others."""
    ends = [WorkersStopped(at=3.0, attempt=1, node=node) for node in ("a", "b")]
    events = told(*joined("a", "b"), *STARTED, WorkersExited(at=2.0, attempt=1, node="b", failures=(FAILURE,)), *ends)
    assert of(events, "WORKER") == [(0, "TERMINATED"), (1, "TERMINATED"), (2, "TERMINATED"), (3, "FAILED")]
    failed = next(event for event in events if event["metadata"]["global_rank"] == 3)
    assert json.loads(failed["metadata"]["raw_error"]) == {"message": "no"}
    assert json.loads(failed["metadata"]["metadata"])["exit_code"] == [1]


def test_the_one_that_hung():
    """It is ended like the others, and FAILED all the same."""
    hung = Failure(attempt=1, node="b", rank=3, local_rank=1, pid=0, at=2.0, exit_code=-9, hung="no step for 5.0 s")
    ended = [replace(hung, node=node, rank=rank, hung="", stopped=True) for node, rank in (("a", 0), ("b", 3))]
    ends = [WorkersStopped(at=3.0, attempt=1, node=end.node, failures=(end,)) for end in ended]
    events = told(*joined("a", "b"), *STARTED, WorkersHung(at=2.0, attempt=1, failures=(hung,)), *ends)
    assert of(events, "WORKER") == [(0, "TERMINATED"), (1, "TERMINATED"), (2, "TERMINATED"), (3, "FAILED")]


def test_nothing_was_started():
    """A run that was stopped while it waited has no workers to tell of."""
    assert told(StopAsked(at=1.0, signal="SIGINT")) == []


def test_torch_reads_them_back():
    """The fields are those of `torch.distributed.elastic.events.Event`."""
    from torch.distributed.elastic.events import Event

    ends = [WorkersExited(at=2.0, attempt=1, node=node) for node in ("a", "b")]
    for event in told(*joined("a", "b"), *STARTED, *ends):
        assert Event.deserialize(json.dumps(event)).name.startswith("torchelastic.worker.status.")
