"""The order in which a worker writes to stdout and stderr. They are two files, and a person wants to see one text.

Before a worker writes to the other file than last time, it notes on the shared page how long both are. The agent reads
the files later, and both as far as a note says before it reads on. Only Python's streams make notes: what C code and
programs that the worker starts write comes between two notes, in no certain order.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections import deque
from typing import Any

from raylaunch.worker.heartbeats.shared_page import ATTEMPT, MAX_WORKERS, PAGE_VARIABLE, SharedPage


class _OwnNotes:
    """The notes of this process."""

    notes: memoryview | None = None
    """How many notes there are, and pairs of sizes: a ring, in which the last notes are kept."""
    last: _NotingFile | None = None
    """The file that was written to last."""


def begin() -> None:
    """Make notes on the page, and for the local rank, that the environment names; none without a page."""
    _OwnNotes.notes = _OwnNotes.last = None
    path, _, local_rank = os.environ.get(PAGE_VARIABLE, "").rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        if int(local_rank) < MAX_WORKERS:
            _OwnNotes.notes = SharedPage.open(path).notes(int(local_rank))


def install() -> None:
    """Let `sys.stdout` and `sys.stderr` make notes, unless they are buffered, were replaced, or are no files."""
    begin()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if type(old) is not io.TextIOWrapper or type(old.buffer) is not io.FileIO:
            continue
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            continue
        file = _NotingFile(fd, "wb", closefd=False)
        file.name = old.name
        new = io.TextIOWrapper(
            file, encoding=old.encoding, errors=old.errors, line_buffering=old.line_buffering, write_through=True
        )
        new.mode = old.mode  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


class _NotingFile(io.FileIO):
    """The file below `sys.stdout` or `sys.stderr`."""

    def write(self, data: Any, /) -> int:
        """Write, after a note if the last write was to the other file."""
        if _OwnNotes.last is not self:
            _OwnNotes.last = self
            _note(_OwnNotes.notes)
        return io.FileIO.write(self, data)


# A script that prints what its streams are finds what plain Python gives it.
_NotingFile.__name__ = _NotingFile.__qualname__ = io.FileIO.__name__
_NotingFile.__module__ = io.FileIO.__module__


def _note(notes: memoryview | None) -> None:
    if notes is None:
        return
    try:
        stdout, stderr = os.fstat(1).st_size, os.fstat(2).st_size
    except OSError:  # the script has closed one of them
        return
    at = _index(notes, notes[0])
    notes[at], notes[at + 1] = stdout, stderr
    notes[0] += 1


def _index(notes: memoryview, number: int) -> int:
    return 1 + 2 * (number % _most(notes))


def _most(notes: memoryview) -> int:
    return len(notes) // 2


class OutputOrder:
    """The notes of one worker, as the agent reads them."""

    def __init__(self, page: SharedPage, attempt: int, local_rank: int) -> None:
        self._page, self._attempt, self._notes = page, attempt, page.notes(local_rank)
        self._seen = 0
        #: How long stdout and stderr were at each switch, as far as the files were not read.
        self.points: deque[tuple[int, int]] = deque(maxlen=_most(self._notes))

    def read(self) -> None:
        """Add the new notes to `points`. Of very many since the last call, the oldest are lost."""
        with contextlib.suppress(ValueError):  # the page is closed
            if self._page.numbers[ATTEMPT] != self._attempt:
                return
            count = self._notes[0]
            for number in range(max(self._seen, count - _most(self._notes) + 1), count):
                at = _index(self._notes, number)
                self.points.append((self._notes[at], self._notes[at + 1]))
            self._seen = count
