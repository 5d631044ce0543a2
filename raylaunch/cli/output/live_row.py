"""A row below the output on a terminal, which shows the live line.

Before output is written the row is erased, and afterwards it is drawn again, on the row below the cursor. The cursor
stays where the output left it: the terminal saves and restores it, with its colours (DECSC, DECRC). No mode of the
terminal is changed, so a process that is killed leaves nothing but a row of text.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TextIO

MIN_COLUMNS, MIN_LINES = 20, 4
"""A smaller terminal gets no row."""
INTERVAL_SECONDS = 0.25
PARTIAL_SECONDS = 1.0
"""How long after output that may end within a character or an escape sequence there is no row."""
MOVED_SECONDS = 10.0
"""How long after output that moves the cursor, as nested bars do, there is no row: it may use the rows below."""
_HIDE_SECONDS = 1.0
"""How long a stop waits for the row to be erased."""

_MOVES = re.compile(rb"\x1b(?!\[[\d;]*m)")
"""Any escape sequence except colours."""
_PARTIAL = re.compile(rb"(?:\x1b[^m]*|[\x80-\xff])\Z")
_MOST_LINE = 4096
"""Bytes. A line that is longer is longer than the terminal is wide."""
_ROOM = "\x1bD\x1b[A"
"""IND and CUU: the cursor keeps its place in the text, and there is a row below it."""
_SHOW_CURSOR = b"\x1b[?25h"


class LiveRow:
    """The row, as bytes for the terminal. One thread calls its methods: the one that writes to the terminal."""

    def __init__(
        self,
        text: Callable[[int], str],
        size: Callable[[], tuple[int, int] | None],
        streams: tuple[str, ...] = ("stdout", "stderr"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text`: the row's text for a number of columns, escape sequences for colours not counted; "": no row.

        `size`: columns and lines of the terminal; None: nothing may be drawn now. `streams`: what goes to it.
        """
        self.streams = streams
        self._text = text
        self._size = size
        self._clock = clock
        self._due_at = 0.0
        #: Before this there is no row, because of the output.
        self._free_at = 0.0
        self._shown = ""
        #: Columns and lines of the terminal when the row was drawn.
        self._shown_in = (0, 0)
        #: The last line end of the output and what follows it: a line that is not complete.
        self._line = b"\n"

    @property
    def seconds_left(self) -> float:
        """How long until the row is due to be drawn again; at most 0: it is."""
        return self._due_at - self._clock()

    def output(self, data: bytes) -> bytes:
        """Return output as it is to be written: erased before it are the row, and a progress bar that it replaces."""
        found = self.erase()
        if self._line == b"\r" and data[:1] != b"\n":
            found += b"\x1b[K"
        line = (self._line + data)[-_MOST_LINE:]
        self._line = line[max(line.rfind(b"\n"), line.rfind(b"\r"), 0) :]
        pause = MOVED_SECONDS if _MOVES.search(data) else PARTIAL_SECONDS if _PARTIAL.search(data[-32:]) else 0.0
        self._free_at = max(self._free_at, self._clock() + pause)
        return found + data

    def draw(self) -> bytes:
        """Return what draws the row where it is missing or has changed."""
        now = self._clock()
        self._due_at = now + INTERVAL_SECONDS
        size = self._size()
        if size is None:
            self._shown = ""  # the shell has written there
            return b""
        # At the end of a full row the cursor waits on the last character, which not all terminals restore.
        is_full = _most_columns(self._line) >= size[0]
        has_room = now >= self._free_at and not is_full and size[0] >= MIN_COLUMNS and size[1] >= MIN_LINES
        text = self._text(size[0] - 1) if has_room else ""
        if not text:
            return self.erase()
        if (text, size) == (self._shown, self._shown_in):
            return b""
        before = self.erase()
        self._shown, self._shown_in = text, size
        found = f"{_ROOM}\x1b7\x1b[B\r\x1b[0m{text}\x1b[0m\x1b8"
        return before + found.encode("ascii", errors="backslashreplace")

    def erase(self) -> bytes:
        """Return what removes the row, if it is there."""
        if not self._shown:
            return b""
        self._shown = ""
        # At the start of a line nothing of the output is to the right. The cursor may be on the row itself: a person
        # has pressed Enter, or another process has written a line.
        return b"\x1b[J" if self._line == b"\n" else b"\x1b7\x1b[B\r\x1b[J\x1b8"

    def close(self) -> bytes:
        """Return what removes the row for good, and shows the cursor, which a killed program may have hidden."""
        return self.erase() + _SHOW_CURSOR


def _most_columns(line: bytes) -> int:
    """Return how many columns a line takes at most: escape sequences count too."""
    text = line.decode(errors="replace").expandtabs()
    return len(text) - 1 + sum(unicodedata.east_asian_width(character) in "WF" for character in text)


def fit_terminal(stderr: TextIO | None, environ: Mapping[str, str]) -> TextIO | None:
    """Return stderr if a row can be kept below the output: the process's own terminal, neither dumb nor in CI.

    None also in a thread, beside which the program may ask for input.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or stderr is None
        or not stderr.isatty()
        or stderr is not sys.__stderr__
    ):
        return None
    is_capable = environ.get("TERM", "") not in ("", "dumb")
    in_ci = environ.get("CI", "false").lower() not in ("", "0", "false")
    return stderr if is_capable and not in_ci else None


def size_of(terminal: int) -> tuple[int, int] | None:
    """Return its columns and lines; None if this process is in the background of its session, or it is gone."""
    try:
        with contextlib.suppress(OSError):  # it is the terminal of another session
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return None
        return os.get_terminal_size(terminal)
    except OSError:
        return None


class SuspendHandler:
    """A handler of SIGTSTP, which Ctrl-Z sends: while this process is stopped, there is no row.

    Make and close it in the main thread. The thread that writes to the terminal looks at `hidden`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` has the thread look at `hidden` soon. A signal handler calls it: it must not need a lock."""
        self._wake = wake
        #: To be set by the thread when it has erased the row; None: the row is to be there.
        self.hidden: threading.Event | None = None
        #: Any other handler belongs to the program that runs this code, or to its caller, and stays.
        self._is_ours = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTSTP, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        hidden = self.hidden = threading.Event()
        self._wake()
        hidden.wait(_HIDE_SECONDS)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self.hidden = None
        self._wake()

    def close(self) -> None:
        """Give SIGTSTP its default action again, if this handler has replaced it."""
        if self._is_ours:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
