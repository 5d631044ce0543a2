"""Core events made of node events: the node is named, and times of its clock become times of the run.

Only this module converts a `NodeTime` into a `RunTime`.
"""

from __future__ import annotations

from dataclasses import fields

from raylaunch.core.failures.failure import Failure, FailureRecord
from raylaunch.core.machine.events_and_actions import (
    WorkerEvent,
    WorkersCheckpointed,
    WorkersElastic,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId, NodeTime, RunTime
from raylaunch.node.protocol.messages import (
    CheckpointAnswer,
    ProcessesExited,
    ProcessesStopped,
    ProcessFailure,
    SurvivorsReady,
    WorkersForked,
)

WorkersReport = WorkersForked | SurvivorsReady | ProcessesExited | ProcessesStopped | CheckpointAnswer
"""What a node reports of its workers that the machine is told."""


def worker_event(
    node: NodeId,
    event: WorkersReport,
    now: RunTime,
    sent_at: NodeTime,
) -> WorkerEvent:
    """Return the core's event. `sent_at` is when the node sent its report, which counts as `now`.

    Times of death are therefore late by what the report took to arrive.
    """
    match event:
        case WorkersForked():
            return WorkersStarted(
                at=now,
                attempt=event.attempt,
                node=node,
                pids=event.pids,
                timings=event.timings,
                held=event.held,
                stayed=event.stayed,
                awaits_commit=event.awaits_commit,
            )
        case SurvivorsReady():
            return WorkersElastic(at=now, attempt=event.attempt, node=node)
        case CheckpointAnswer():
            return WorkersCheckpointed(at=now, attempt=event.attempt, node=node, step=event.step)
        case ProcessesExited() | ProcessesStopped():
            kind = WorkersExited if isinstance(event, ProcessesExited) else WorkersStopped
            failures = tuple(_failure(node, found, now - sent_at) for found in event.failures)
            return kind(at=now, attempt=event.attempt, node=node, failures=failures)


def _failure(node: NodeId, found: ProcessFailure, offset: float) -> Failure:
    record = {one.name: getattr(found, one.name) for one in fields(FailureRecord)}
    return Failure(node=node, at=RunTime(found.at + offset), **record)
