"""Writes a file line by line in a thread of its own: a disk that is slow, or stands still, is nobody else's affair."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TextIO


class Scribe:
    """What was written comes to the file in order, at once where the disk allows it, and at the latest with `close`."""

    def __init__(self, file: TextIO, failed: Callable[[OSError], None]) -> None:
        """`failed` is told once, from the thread, that nothing more will be written."""
        self._file = file
        self._failed = failed
        self._lines: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="raylaunch-scribe")
        self._thread.start()
        atexit.register(self.close)  # what led to an end that nobody expected is to be read there too

    def write(self, line: Callable[[], str]) -> None:
        """One more line; the thread asks for its text."""
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all is written."""
        self._lines.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        try:
            with self._file:
                while self._write([self._lines.get()]):
                    pass
        except OSError as error:
            self._failed(error)

    def _write(self, lines: list[Callable[[], str] | None]) -> bool:
        """All that is there, at once."""
        with contextlib.suppress(queue.Empty):
            while lines[-1] is not None:
                lines.append(self._lines.get_nowait())
        self._file.write("".join(f"{line()}\n" for line in lines if line is not None))
        self._file.flush()
        return lines[-1] is not None
