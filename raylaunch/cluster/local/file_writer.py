"""Files that only the user may read, and a thread that writes them: a file system may not answer."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from raylaunch.cluster.succession.folder_fence import opened

STALL_SECONDS = 5.0
"""The end of a run waits this long for a file system that does not answer."""


def open_private(path: Path) -> TextIO:
    """Open a new or emptied file that only the user may read, to write text. Raises OSError, also for a link."""
    return os.fdopen(opened(path, os.O_TRUNC), "w", encoding="utf-8", errors="backslashreplace")


class FileWriter:
    """Does in a thread, one after the other, what may wait for a file system."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do, daemon=True, name="raylaunch-journal")
        self._thread.start()
        atexit.register(self.close)  # the journal is needed most after an unexpected end

    def put(self, work: Callable[[], None]) -> None:
        """Have the thread do something. Never blocks."""
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
        """Wait until all is done, and return True; False if nothing was done for 5 s, or on Ctrl-C."""
        atexit.unregister(self.close)
        self._work.put(None)
        left = None
        with contextlib.suppress(KeyboardInterrupt):
            while self._thread.is_alive() and left != self._work.qsize():
                left = self._work.qsize()
                self._thread.join(STALL_SECONDS)
        return not self._thread.is_alive()

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            work()
