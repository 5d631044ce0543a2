"""Where output waits to be shown when nothing is kept: a folder on the node that goes with the run.

Whoever makes one removes it; the keeper, which outlives its agent, does so for an agent that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import stat
import tempfile

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_KEPT = 64 * 1024
"""Bytes: the last ones stay, for the failure report."""

_LIBC = ctypes.CDLL(None)


def name() -> str:
    """For a new folder, so that whoever is to remove it knows of it before it is there."""
    return os.path.join(tempfile.gettempdir(), f"raylaunch-{secrets.token_hex(8)}")


def make(folder: str) -> None:
    """If it is not there, or was removed. Raises OSError where it is somebody else's."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise


def empty(folder: str) -> None:
    """All that is in it; the folder itself stays, lest somebody else make one of its name."""
    with contextlib.suppress(OSError):
        for inside in os.listdir(folder):
            remove(os.path.join(folder, inside))


def remove(folder: str) -> None:
    """All of it. That some of it is gone already is no obstacle."""
    shutil.rmtree(folder, ignore_errors=True)


def forget(fd: int, end: int) -> None:
    """Give the disk back what lies before; the file keeps its length. Where a file system cannot, it stays."""
    if end > _KEPT:
        length = ctypes.c_int64(end - _KEPT)
        _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), length)
