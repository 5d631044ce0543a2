"""Write to stdout and stderr from a thread, so that a slow, blocked or closed terminal never blocks the driver."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TextIO

from raylaunch.cli.output.live_row import LiveRow, SuspendHandler, fit_terminal, size_of

MAX_QUEUED = 32 * 1024 * 1024
"""Bytes that may wait to be written. Beyond them, the job's output is dropped and counted until half is written."""
CHUNK = 64 * 1024
STALL_SECONDS = 5.0
"""`close` gives up when nothing was written for this long."""
_NONBLOCKING = 512
"""Bytes that a file takes without blocking when poll(2) says that it is writable: POSIX's minimum for PIPE_BUF."""

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""The reader of a pipe or the terminal is gone, or the stream was closed."""
_WAKE = ("stderr", b"")
"""Nothing to write, but the thread looks at the row again."""

Sink = Callable[[bytes], None]


class AsyncWriter:
    """Writes to both streams in a thread, in the order of the calls. Its methods may be called from any thread."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None) -> None:
        #: Whether log files contain the output that is dropped here.
        self.has_log_files = True
        self._files = {"stdout": stdout, "stderr": stderr}
        self._sinks = {stream: _sink(file) for stream, file in self._files.items()}
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._dropped = 0
        #: The stream that the thread writes to.
        self._current = ""
        self._given_up = False
        self._row: LiveRow | None = None
        self._suspend_handler: SuspendHandler | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="raylaunch-output")
        self._thread.start()

    def put(self, stream: str, data: bytes) -> None:
        """Write output of the job. Never blocks; drops the output if too much is queued."""
        with self._lock:
            limit = MAX_QUEUED // 2 if self._dropped else MAX_QUEUED
            if self._queued + len(data) > limit:
                self._dropped += len(data)
                return
            self._report_dropped()
            self._enqueue(stream, data)

    def say(self, data: bytes) -> None:
        """Write a message of raylaunch to stderr. Never blocks, and is never dropped."""
        with self._lock:
            self._enqueue("stderr", data)

    def show_row(self, text: Callable[[int], str]) -> bool:
        """Show a row below all output if stderr is a terminal that is fit for it, and return whether it is.

        `text` returns the row for a number of columns. Call this, and `close`, in the main thread.
        """
        terminal = fit_terminal(self._files["stderr"], os.environ)
        if terminal is None:
            return False
        fd, stdout = terminal.fileno(), self._files["stdout"]
        streams = ("stdout", "stderr") if stdout is not None and stdout.isatty() else ("stderr",)
        self._row = LiveRow(text, lambda: size_of(fd), streams)
        self._suspend_handler = SuspendHandler(lambda: self._queue.put(_WAKE))
        self._queue.put(_WAKE)
        return True

    def close(self) -> None:
        """Wait until all is written. Gives up if nothing is written for 5 s, or on Ctrl-C."""
        with self._lock:
            self._report_dropped()
        self._queue.put(None)
        try:
            before = None
            while self._thread.is_alive() and before != self._queued:
                before = self._queued
                self._thread.join(timeout=STALL_SECONDS)
        except KeyboardInterrupt:
            pass
        if self._thread.is_alive():
            self._give_up()
        if self._suspend_handler is not None:
            self._suspend_handler.close()

    def _enqueue(self, stream: str, data: bytes) -> None:
        self._queued += len(data)
        self._queue.put((stream, data))

    def _report_dropped(self) -> None:
        """Queue the count of dropped bytes, at the place in the output where they are missing."""
        if self._dropped:
            self._enqueue("stderr", self._dropped_message(self._dropped))
            self._dropped = 0

    def _dropped_message(self, count: int) -> bytes:
        return f"raylaunch: {count} bytes of output are not shown{self._where()}\n".encode()

    def _report_lost(self, error: Exception) -> None:
        """Say once that stdout loses output, for example since a disk is full, unless nobody reads it any more."""
        if self._current == "stdout" and isinstance(error, OSError) and error.errno not in _GONE:
            self._sinks["stdout"] = _without_errors(self._sinks["stdout"])
            data = f"raylaunch: stdout cannot be written: {error.strerror}{self._where()}\n".encode()
            self._write_stderr(data if self._row is None else self._row.output(data))

    def _where(self) -> str:
        return "; the log files contain all of it" if self.has_log_files else ""

    def _write(self) -> None:
        while (item := self._next()) is not None:
            self._current, data = item
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                row = self._row if self._row is not None and self._current in self._row.streams else None
                try:
                    self._sinks[self._current](chunk if row is None else row.output(chunk))
                except Exception as error:  # noqa: BLE001  # perhaps of a replaced stream; the run goes on
                    self._report_lost(error)
                with self._lock:
                    self._queued -= len(chunk)
                if self._given_up:
                    return
        if self._row is not None:
            self._write_stderr(self._row.close())

    def _next(self) -> tuple[str, bytes] | None:
        """Return the next item of the queue. The row is drawn when there is none, and when it is due."""
        while (row := self._row) is not None:
            if self._queue.empty() or row.seconds_left <= 0:
                self._draw_row(row)
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=max(0.0, row.seconds_left))
        return self._queue.get()

    def _draw_row(self, row: LiveRow) -> None:
        hidden = self._suspend_handler.hidden if self._suspend_handler is not None else None
        self._write_stderr(row.draw() if hidden is None else row.erase())
        if hidden is not None:
            hidden.set()

    def _write_stderr(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(Exception):
                self._sinks["stderr"](data)

    def _give_up(self) -> None:
        """If stdout is blocked, write what is queued for stderr, as far as that works without blocking."""
        self._given_up = True
        if self._current == "stderr":
            return
        messages = []
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                if item[0] == "stderr":
                    messages.append(item[1])
        dropped = self._queued - sum(map(len, messages))
        if dropped:
            messages.append(self._dropped_message(dropped))
        with contextlib.suppress(Exception):
            _write_nonblocking(self._files["stderr"], b"".join(messages), self._sinks["stderr"])


def _sink(file: TextIO | None) -> Sink:
    """Return the function that writes to a file.

    The process's own streams are written without Python's buffers: a thread that blocks in them would block the exit.
    """
    if file is None:
        return lambda _: None
    if _is_process_stream(file):
        file.flush()
        return partial(_write_all, file.fileno())

    def write(data: bytes) -> None:
        """Write to a replacement of the stream, as a notebook or a test has it."""
        if hasattr(file, "buffer"):
            file.buffer.write(data)
        else:
            file.write(data.decode(errors="replace"))
        file.flush()

    return write


def _without_errors(sink: Sink) -> Sink:
    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):
            sink(data)

    return write


def _is_process_stream(file: TextIO) -> bool:
    return file in (sys.__stdout__, sys.__stderr__)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process that shares the terminal made it non-blocking
            _is_writable(fd, None)


def _write_nonblocking(file: TextIO | None, data: bytes, sink: Sink) -> None:
    for start in range(0, len(data), _NONBLOCKING):
        if file is not None and _is_process_stream(file) and not _is_writable(file.fileno(), 1.0):
            return
        sink(data[start : start + _NONBLOCKING])


def _is_writable(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
