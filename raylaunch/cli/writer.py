"""Writing to a terminal that may be slow, stand still, or be gone. None of that may stop the driver or a worker."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TextIO

_MOST_WAITING = 32 * 1024 * 1024
"""Bytes of the job's output that may wait; what comes beyond is left out and counted, until half of it is written."""
_PIECE = 64 * 1024
_STANDSTILL_SECONDS = 5.0
_SURE = 512
"""Bytes that whatever is ready to be written to takes without blocking: the least that POSIX has for PIPE_BUF."""

Sink = Callable[[bytes], None]


class OutputWriter:
    """Writes in a thread of its own, everything in the order in which it was put."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None) -> None:
        #: Whether what is left out here can be found in log files.
        self.kept = True
        self._files = {"stdout": stdout, "stderr": stderr}
        self._sinks = {stream: _sink(file) for stream, file in self._files.items()}
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._left_out = 0
        self._writing = ""
        self._given_up = False
        self._thread = threading.Thread(target=self._write, daemon=True, name="raylaunch-output")
        self._thread.start()

    def put(self, stream: str, data: bytes) -> None:
        """Never blocks. Output of the job: it may be left out."""
        with self._lock:
            most = _MOST_WAITING // 2 if self._left_out else _MOST_WAITING
            if self._waiting + len(data) > most:
                self._left_out += len(data)
                return
            self._own_up()
            self._put(stream, data)

    def say(self, data: bytes) -> None:
        """Never blocks. Words of ours: to stderr, and never left out."""
        with self._lock:
            self._put("stderr", data)

    def close(self) -> None:
        """Wait for a terminal that moves; leave one that does not, or of which a person has enough."""
        with self._lock:
            self._own_up()
        self._queue.put(None)
        try:
            before = None
            while self._thread.is_alive() and before != self._waiting:
                before = self._waiting
                self._thread.join(timeout=_STANDSTILL_SECONDS)
        except KeyboardInterrupt:
            pass
        if self._thread.is_alive():
            self._give_up()

    def _put(self, stream: str, data: bytes) -> None:
        self._waiting += len(data)
        self._queue.put((stream, data))

    def _own_up(self) -> None:
        """Say what was left out, at the place where it would have been."""
        if self._left_out:
            self._put("stderr", self._confession(self._left_out))
            self._left_out = 0

    def _confession(self, count: int) -> bytes:
        where = "; the log files have all of it" if self.kept else ""
        return f"raylaunch: {count} bytes of output are not shown{where}\n".encode()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            self._writing, data = item
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the run goes on
                    self._sinks[self._writing](piece)
                with self._lock:
                    self._waiting -= len(piece)
                if self._given_up:
                    return

    def _give_up(self) -> None:
        """Where stdout stands still, our words and the job's stderr may be read all the same."""
        self._given_up = True
        if self._writing == "stderr":
            return
        words = []
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                if item[0] == "stderr":
                    words.append(item[1])
        left_out = self._waiting - sum(map(len, words))
        if left_out:
            words.append(self._confession(left_out))
        with contextlib.suppress(OSError, ValueError):
            _write_what_fits(self._files["stderr"], b"".join(words), self._sinks["stderr"])


def _sink(file: TextIO | None) -> Sink:
    """Straight to the process's own streams, past Python's buffers: a thread that hangs there would hang the exit."""
    if file is None:
        return lambda _: None
    if _is_own(file):
        file.flush()
        return partial(_write_all, file.fileno())

    def through(data: bytes) -> None:
        """Somebody's replacement: a test's, a notebook's."""
        if hasattr(file, "buffer"):
            file.buffer.write(data)
        else:
            file.write(data.decode(errors="replace"))
        file.flush()

    return through


def _is_own(file: TextIO) -> bool:
    return file in (sys.__stdout__, sys.__stderr__)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody who shares the terminal with us wants it so
            _is_ready(fd, None)


def _write_what_fits(file: TextIO | None, data: bytes, sink: Sink) -> None:
    for start in range(0, len(data), _SURE):
        if file is not None and _is_own(file) and not _is_ready(file.fileno(), 1.0):
            return
        sink(data[start : start + _SURE])


def _is_ready(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
