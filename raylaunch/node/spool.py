"""Where output waits to be shown when nothing is kept: a folder on the node that goes with the run.

Whoever makes one removes it; the keeper, which outlives its agent, does so for an agent that was killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_KEPT = 64 * 1024
"""Bytes: the last ones stay, for the failure report."""

_LIBC = ctypes.CDLL(None)


def make() -> str:
    """A new folder, nobody else's."""
    return tempfile.mkdtemp(prefix="raylaunch-")


def empty(folder: str) -> None:
    """All that is in it."""
    remove(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)


def remove(folder: str) -> None:
    """All of it. That some of it is gone already is no obstacle."""
    shutil.rmtree(folder, ignore_errors=True)


def forget(fd: int, end: int) -> None:
    """Give the disk back what lies before; the file keeps its length. Where a file system cannot, it stays."""
    if end > _KEPT:
        length = ctypes.c_int64(end - _KEPT)
        _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), length)
