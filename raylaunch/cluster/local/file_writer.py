"""Files that only the user may read, and a thread that writes them: a file system may not answer."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, TextIO

_FILE_MODE = 0o600
STALL_SECONDS = 5.0
"""The end of a run waits this long for a file system that does not answer."""


def opened(path: Path, flags: int = os.O_APPEND) -> int:
    """Open a file that only the user may read, to write to it. Raises OSError, also for a link."""
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)


def open_private(path: Path) -> TextIO:
    """Open a new or emptied file that only the user may read, to write text. Raises OSError, also for a link."""
    return os.fdopen(opened(path, os.O_TRUNC), "w", encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def replacing(name: str | Path, folder: int | None = None) -> Iterator[BinaryIO]:
    """Write a file that only the user may read. It appears whole, in the place of what had its name, also of a link.

    Nobody else can have made the file that is written, whoever may write to its folder. `folder`: the descriptor of the
    folder that a relative name is in. Raises OSError.
    """
    path = Path(name)
    aside = path.with_name(f".{path.name}.{token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, 0o600, dir_fd=folder), "wb") as file:
            yield file
        os.replace(aside, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


@contextlib.contextmanager
def own_folder(path: Path, *inner: str) -> Iterator[int]:
    """Open a folder inside `path`, and make what is not there; only the user may enter what is made inside.

    Yields its descriptor. `path` may be a link, what is inside may not: another user may have put it there. Raises
    OSError.
    """
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in inner:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            above, fd = fd, os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


class FileWriter:
    """Does in a thread, one after the other, what may wait for a file system."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do, daemon=True, name="raylaunch-journal")
        self._thread.start()
        atexit.register(self.close)  # the journal is needed most after an unexpected end

    def put(self, work: Callable[[], None]) -> None:
        """Queue work for the thread. Never blocks."""
        self._work.put(work)

    @property
    def waiting(self) -> int:
        """How much waits to be done."""
        return self._work.qsize()

    def drain(self) -> bool:
        """Wait until all is done, and return True; False if nothing was done for 5 s, or on Ctrl-C."""
        done = threading.Event()
        self._work.put(done.set)
        left = None
        with contextlib.suppress(KeyboardInterrupt):
            while not done.is_set() and left != self._work.qsize():
                left = self._work.qsize()
                done.wait(STALL_SECONDS)
        return done.is_set()

    def close(self) -> bool:
        """Wait as `drain` does, and return the same. Then the thread ends."""
        atexit.unregister(self.close)
        is_done = self.drain()
        self._work.put(None)
        return is_done

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            work()
