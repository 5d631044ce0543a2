"""In which order a worker writes to stdout and stderr. They are two files, and a person wants to see one text.

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

from raylaunch.worker.heartbeats.shared_page import (
    ATTEMPT,
    MAX_NOTES,
    PAGE_VARIABLE,
    SWITCHES,
    SharedPage,
    notes_offset,
    slot_offset,
)


class _Notes:
    """Where this process makes its notes."""

    numbers: memoryview | None = None
    slot = notes = 0
    #: The file that was written to last.
    last: _NotingFile | None = None


def begin() -> None:
    """Make notes on the page, and for the local rank, that the environment names; none without a page."""
    _Notes.numbers = _Notes.last = None
    path, _, local_rank = os.environ.get(PAGE_VARIABLE, "").rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        _Notes.slot, _Notes.notes = slot_offset(int(local_rank)), notes_offset(int(local_rank))
        _Notes.numbers = SharedPage.open(path).numbers


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
        new = io.TextIOWrapper(file, encoding=old.encoding, errors=old.errors, write_through=True)
        new.mode = old.mode  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


class _NotingFile(io.FileIO):
    """The file below `sys.stdout` or `sys.stderr`."""

    def write(self, data: Any, /) -> int:
        """Write, after a note if the last write was to the other file."""
        if _Notes.last is not self:
            _Notes.last = self
            _note()
        return io.FileIO.write(self, data)


def _note() -> None:
    numbers = _Notes.numbers
    if numbers is None:
        return
    try:
        stdout, stderr = os.fstat(1).st_size, os.fstat(2).st_size
    except OSError:  # the script has closed one of them
        return
    count = numbers[_Notes.slot + SWITCHES]
    at = _Notes.notes + 2 * (count % MAX_NOTES)
    numbers[at], numbers[at + 1] = stdout, stderr
    numbers[_Notes.slot + SWITCHES] = count + 1


class OutputOrder:
    """The notes of one worker, as the agent reads them."""

    def __init__(self, page: SharedPage, attempt: int, local_rank: int) -> None:
        self._page, self._attempt, self._local_rank = page, attempt, local_rank
        self._seen = 0
        #: How long stdout and stderr were at each switch, as far as the files were not read.
        self.points: deque[tuple[int, int]] = deque()

    def read(self) -> None:
        """Add the new notes to `points`. Of very many since the last call, the oldest are lost."""
        numbers, slot, notes = self._page.numbers, slot_offset(self._local_rank), notes_offset(self._local_rank)
        with contextlib.suppress(ValueError):  # the page is closed
            if numbers[ATTEMPT] != self._attempt:
                return
            count = numbers[slot + SWITCHES]
            for index in range(max(self._seen, count - MAX_NOTES + 1), count):
                at = notes + 2 * (index % MAX_NOTES)
                self.points.append((numbers[at], numbers[at + 1]))
            self._seen = count
