"""Decides which process writes a worker's slot of the shared page: the worker, and none of the processes it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from raylaunch.worker.heartbeats import optimizers, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.heartbeats.shared_page import SharedPage, slot_offset

ATTEMPT_VARIABLE = "RAYLAUNCH_ATTEMPT"
"""In a worker's environment: the number of its attempt."""
WITH_SURVIVORS_VARIABLE = "RAYLAUNCH_WITH_SURVIVORS"
"""In a worker's environment: `1` if other workers of its attempt may be processes of the attempt before."""

_writers: list[HeartbeatWriter | None] = []
"""The writer of this process, or None if it owns no slot; empty before `claim`."""


def current_writer() -> HeartbeatWriter | None:
    """Return the writer of this process, and claim the slot if that was not tried yet.

    None: outside a launch, and in a process that only inherited a worker's environment.
    """
    if not _writers:
        claim()
    return _writers[0]


def claim() -> None:
    """Take the slot that the environment names, if it has no living owner.

    `boot` calls this in a worker. A `command` may be a shell around the script; there the owner is the first process
    that uses `raylaunch.worker`. Child processes of an owner never own a slot.
    """
    writer = _open_writer(os.environ) if not _is_child_of_multiprocessing() else None
    _writers[:] = [writer]
    if writer is not None:
        optimizers.install(writer)


def release() -> None:
    """Give up the slot in this process, as a forked child does; the next use claims it anew."""
    for writer in filter(None, _writers):
        writer.detach()
    _writers.clear()


def wait_instead_of_exiting() -> None:
    """Wait if the script ends with exit code 0 after `should_checkpoint` returned True, without `checkpointed`.

    Such a script has saved, but its training is not finished, as exit code 0 would say.
    """
    writer = current_writer()
    if writer is not None and writer.save_in_progress:
        completed = writer.save_in_progress
        writer.record_saved(completed)
        writer.wait_for_stop(completed)


os.register_at_fork(after_in_child=release)


def _is_child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _open_writer(environ: Mapping[str, str]) -> HeartbeatWriter | None:
    path, _, local_rank = environ.get(shared_page.PAGE_VARIABLE, "").rpartition(":")
    if not path or not local_rank.isdecimal() or int(local_rank) >= shared_page.MAX_WORKERS:
        return None
    try:
        numbers = SharedPage.open(path).numbers
    except (OSError, ValueError):
        return None
    slot = slot_offset(int(local_rank))
    owner = numbers[slot + shared_page.OWNER_PID]
    if owner not in (0, os.getpid()) and _is_alive(owner):
        return None
    if environ.get(ATTEMPT_VARIABLE, str(numbers[shared_page.ATTEMPT])) != str(numbers[shared_page.ATTEMPT]):
        return None  # a process left over from an earlier attempt
    numbers[slot + shared_page.OWNER_PID] = os.getpid()
    return HeartbeatWriter(numbers, slot)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
