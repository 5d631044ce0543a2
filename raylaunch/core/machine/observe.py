"""The events that follow from what is new in what a node says of its workers.

A node tells what is, and not what has happened: its newest `WorkersStatus` is the whole truth. So a status that is
lost, or comes twice, costs nothing: `observe` makes the same events of the next one.
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
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from raylaunch.core.newtypes import NodeId, NodeTime, RunTime


def observe(
    node: NodeId, old: WorkersStatus, new: WorkersStatus, *, now: RunTime, sent_at: NodeTime
) -> list[WorkerEvent]:
    """Return what has happened between two statuses of a node, in an order in which it can have happened.

    `sent_at`: when the node sent the new one, on its own clock. It counts as `now`, so times of death are late by what
    the message took to arrive. A status of an earlier attempt than the old one's has nothing new.
    """
    if new.attempt < old.attempt:
        return []
    if new.attempt > old.attempt:
        old = WorkersStatus(attempt=new.attempt)
    attempt, offset = new.attempt, now - sent_at
    found: list[WorkerEvent] = []
    if new.pids is not None and old.pids is None:
        found.append(
            WorkersStarted(
                at=now,
                attempt=attempt,
                node=node,
                pids=new.pids,
                timings=new.timings,
                stayed=new.stayed,
            )
        )
    if new.can_stay and not old.can_stay:
        found.append(WorkersElastic(at=now, attempt=attempt, node=node))
    if failed := new.failures[len(old.failures) :]:
        found.append(WorkersExited(at=now, attempt=attempt, node=node, failures=_failures(node, failed, offset)))
    if new.succeeded and not old.succeeded:
        found.append(WorkersExited(at=now, attempt=attempt, node=node))
    if new.has_saved and not old.has_saved:
        found.append(WorkersCheckpointed(at=now, attempt=attempt, node=node, step=new.saved))
    if new.stopped is not None and old.stopped is None:
        found.append(WorkersStopped(at=now, attempt=attempt, node=node, failures=_failures(node, new.stopped, offset)))
    return found


def _failures(node: NodeId, failures: tuple[WorkerExit, ...], offset: float) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            node=node,
            at=RunTime(failure.at + offset),
            **{field.name: getattr(failure, field.name) for field in fields(FailureRecord)},
        )
        for failure in failures
    )
