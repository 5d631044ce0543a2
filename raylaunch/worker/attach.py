"""Which process writes a worker's slot of the page: the worker itself, and none of those it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from raylaunch.worker import optimizers, page
from raylaunch.worker.page import Page, slot
from raylaunch.worker.watch import Watch

ATTEMPT = "RAYLAUNCH_ATTEMPT"
"""In a worker's environment: the attempt it belongs to."""

_watches: list[Watch | None] = []
"""This process's, or None where it has none; empty until somebody asked."""


def present() -> Watch | None:
    """The watch of this process. None: outside a launch, or in a process that only inherited a worker's environment."""
    if not _watches:
        begin()
    return _watches[0]


def begin() -> None:
    """Look for the page, and take part of it into possession.

    A slot has one owner. boot makes the worker it; of a `command`, which may be a shell around the script, it is the
    first process that uses `raylaunch.worker`. Children of the owner, forked or not, are no workers.
    """
    watch = _found(os.environ) if not _is_child_of_multiprocessing() else None
    _watches[:] = [watch]
    if watch is not None:
        optimizers.follow(watch)


def _forget() -> None:
    for watch in filter(None, _watches):
        watch.forget()
    _watches.clear()


os.register_at_fork(after_in_child=_forget)


def _is_child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _found(environ: Mapping[str, str]) -> Watch | None:
    path, _, local_rank = environ.get(page.VARIABLE, "").rpartition(":")
    if not path or not local_rank.isdecimal() or int(local_rank) >= page.MOST_WORKERS:
        return None
    try:
        numbers = Page.open(path).numbers
    except (OSError, ValueError):
        return None
    first = slot(int(local_rank))
    owner = numbers[first + page.OWNER]
    if owner not in (0, os.getpid()) and _lives(owner):
        return None
    if environ.get(ATTEMPT, str(numbers[page.ATTEMPT])) != str(numbers[page.ATTEMPT]):
        return None  # a process that was left over from an earlier attempt
    numbers[first + page.OWNER] = os.getpid()
    return Watch(numbers, first)


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
