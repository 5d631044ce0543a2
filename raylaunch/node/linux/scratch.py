"""Scratch folders: where workers write their output when it is only shown and not kept (`log_dir=/dev/null`).

A scratch folder belongs to one run on one node. Its creator removes it; the subreaper, which outlives the agent,
removes it for an agent that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
AGENT_LOCK = "agent"
"""In a folder for files in memory: what its agent has a lock on (flock(2)). The user's script never sees it."""
_KEPT_BYTES = 64 * 1024
"""The end of a log that is never discarded: the failure report quotes it."""

_LIBC = ctypes.CDLL(None)


def new_path() -> str:
    """Return a path for a new folder, so that the process that will remove it can be told before it exists."""
    return os.path.join(tempfile.gettempdir(), f"raylaunch-{secrets.token_hex(8)}")


def create(path: str) -> None:
    """Create the folder unless it exists. Raises OSError, also where something of another user has the name."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise


def clear(path: str) -> None:
    """Remove everything in the folder. The folder stays, so that nobody else can take its name."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            remove(inner)
            with contextlib.suppress(OSError):  # it was a folder
                os.unlink(inner)


def remove(path: str) -> None:
    """Remove the folder and everything in it, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def is_locked(path: str) -> bool:
    """Return whether another process has a lock on the folder. False, too, where there is no folder."""
    with locked(path) as is_ours:
        return not is_ours and os.path.isdir(path)


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool]:
    """Lock a folder, and give whether that was possible: nobody else has a lock, and there is a folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(fd)


def discard_before(fd: int, end: int) -> None:
    """Free the disk space of a file's bytes before the offset `end`, except the last 64 KiB of them.

    The file keeps its size (fallocate(2) with FALLOC_FL_PUNCH_HOLE). Nothing happens where the file system lacks that.
    """
    if end > _KEPT_BYTES:
        length = ctypes.c_int64(end - _KEPT_BYTES)
        _LIBC.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, ctypes.c_int64(0), length)
