"""When the lines of a log file were written: entries in a file beside it, which its node's agent writes.

Log files stay as the workers wrote them. An entry says how many bytes the log had by a time: the time of its last
change, which the file system keeps, so the last line before a pause has the time of its write. While a worker goes on
writing, the agent looks ten times a second.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterator

_ENTRY = struct.Struct("<Qd")
_RECENT_SECONDS = 10.0
_LINE_BYTES = 64 * 1024
_LINE_ENDS = (b"\n", b"\r")


class TimesWriter:
    """Writes the entries of one log. What cannot be written is left out: those lines have the next entry's time."""

    def __init__(self, path: str) -> None:
        """`path`: of the file with the times."""
        self._path = path
        self._fd = -1
        self._size = 0

    def record(self, log_fd: int) -> None:
        """Note how long the log is now, if it has grown since the last call."""
        with contextlib.suppress(OSError):
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                self._fd = os.open(self._path, flags, 0o600)
            log = os.fstat(log_fd)
            if log.st_size < self._size:  # the script has truncated its log
                os.ftruncate(self._fd, 0)
            if log.st_size != self._size and log.st_size:
                self._append(_ENTRY.pack(log.st_size, log.st_mtime))
            self._size = log.st_size

    def _append(self, entry: bytes) -> None:
        """Append an entry whole, or nothing of it. Raises OSError."""
        end = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, entry)
        except OSError:
            written = 0
        if written < len(entry):
            os.ftruncate(self._fd, end)

    def close(self) -> None:
        """Close the file, to which nothing is added any more."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


class LogTimes:
    """The entries of one log, to be read. They are sorted by size; times do not go back unless a clock does."""

    def __init__(self, path: str, log_fd: int) -> None:
        """`path`: of the file with the times, which may be missing. Raises OSError."""
        log = os.fstat(log_fd)
        #: The last change is an entry too: it may not have been noted yet.
        self._last = (log.st_size, log.st_mtime)
        self._log_fd = log_fd
        self._fd, self._noted = -1, 0
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            times = os.fstat(self._fd)
            self._noted = times.st_size // _ENTRY.size if stat.S_ISREG(times.st_mode) else 0

    @property
    def are_known(self) -> bool:
        """Whether times were noted. The log of a worker that has just started may have none yet."""
        return self._fd >= 0 or time.time() - self._last[1] < _RECENT_SECONDS

    def __len__(self) -> int:
        return self._noted + 1

    def __getitem__(self, index: int) -> tuple[int, float]:
        """Return the size and the time of an entry. Raises IndexError."""
        if not 0 <= index <= self._noted:
            raise IndexError(index)
        if index == self._noted:
            return self._last
        found = os.pread(self._fd, _ENTRY.size, index * _ENTRY.size)
        return _ENTRY.unpack(found) if len(found) == _ENTRY.size else self._last

    def between(self, start: int, end: int) -> Iterator[tuple[int, float]]:
        """Yield the entries that tell when the bytes from `start` to before `end` had been written."""
        if not self.are_known:
            return
        for index in range(bisect.bisect_right(self, start, key=lambda entry: entry[0]), len(self)):
            yield self[index]
            if self[index][0] >= end:
                return

    def start_since(self, since: float) -> int:
        """Return where the first line begins that ended at this time or later. Without times that may be any line."""
        if self._last[1] < since:
            return self._last[0]
        index = bisect.bisect_left(self, since, key=lambda entry: entry[1])
        return self._start_of_line(min(self[index - 1][0], self._last[0])) if index else 0

    def _start_of_line(self, position: int) -> int:
        before = max(0, position - _LINE_BYTES)
        text = os.pread(self._log_fd, position - before, before)
        return before + 1 + max(map(text.rfind, _LINE_ENDS), default=-1) if text else position

    def close(self) -> None:
        """Close the file with the times; the log is the caller's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
