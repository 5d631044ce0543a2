"""Reads the progress of a node's workers from its shared page."""

from __future__ import annotations

import time

from raylaunch.core.machine.commits import CommitRate, NodeMemory
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.node.linux import procfs
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage

_QUIET_SECONDS = 1.0
"""A worker with a later sign of life is not stopped, or only just. To look costs a system call for each worker."""


def read_heartbeat(page: SharedPage, state: AttemptState | None, memory: NodeMemory) -> Heartbeat | None:
    """Return the progress of all live workers, and once more of each that has ended. None: none are started."""
    if state is None or not state.pids:
        return None
    now = time.monotonic_ns()
    marks = [
        _mark(page, local_rank, rank, now, 0 if rank in state.ends else pid)
        for local_rank, rank, pid in state.forked()
        if local_rank < fields.MAX_WORKERS and rank not in state.shown
    ]
    state.shown |= state.ends.keys()
    return Heartbeat(
        attempt=state.attempt,
        marks=tuple(marks),
        memory=memory if memory.own or memory.copies or memory.files else None,
        copied=page.numbers[fields.COPIED_STEPS] or None,
    )


def _mark(page: SharedPage, local_rank: int, rank: int, now: int, pid: int) -> WorkerProgress:
    """`pid`: the worker's process id; 0: it has ended."""
    numbers, slot = page.numbers, fields.slot_offset(local_rank)
    marked_at, first_at = numbers[slot + fields.ALIVE_AT], numbers[slot + fields.FIRST_PROGRESS_AT]
    is_quiet = now - marked_at > _QUIET_SECONDS * 1e9
    return WorkerProgress(
        rank=rank,
        marks=numbers[slot + fields.PROGRESS],
        age=max(0.0, (now - marked_at) / 1e9) if marked_at else 0.0,
        step=_step(numbers[slot + fields.LAST_STEP]),
        asked=_step(numbers[slot + fields.POLLED_STEP]),
        saved=_step(numbers[slot + fields.SAVED_STEP]),
        busy=numbers[slot + fields.BUSY] > 0,
        stopped=is_quiet and pid > 0 and procfs.is_stopped(pid),
        first_age=max(0.0, (now - first_at) / 1e9) if first_at else None,
        first_step=_step(numbers[slot + fields.FIRST_STEP]),
        committed=numbers[slot + fields.COMMITTED_STATE] or None,
        commit_rate=_commit_rate(page, slot),
    )


def _commit_rate(page: SharedPage, slot: int) -> CommitRate | None:
    numbers = page.numbers
    every = numbers[slot + fields.COMMIT_EVERY]
    if not every:
        return None
    commit, step = numbers[slot + fields.COMMIT_NS], numbers[slot + fields.STEP_NS]
    return CommitRate(every=every, commit_seconds=commit / 1e9, step_seconds=step / 1e9)


def _step(number: int) -> int | None:
    """Decode a step, which the page holds plus one, so that 0 means none."""
    return number - 1 if number else None
