r"""A row at the bottom of a terminal that stays below the output, which is passed on untouched.

The rows above are made the terminal's scrolling region (DECSTBM), as apt does for its progress. The cursor stays where
the output left it: saving it (DECSC) before the row is drawn, and restoring it (DECRC), keeps position and colours. So
the output may move the cursor, as tqdm and Rich do, be wider than the terminal, or end without a newline. What scrolls
out of a region that begins at the first row goes to the terminal's history as always.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Callable

MIN_COLUMNS, MIN_LINES = 20, 4
"""A smaller terminal gets no row."""
INTERVAL_SECONDS = 0.25
SPLIT_SECONDS = 1.0
"""How long the row waits for the rest of an escape sequence, a character or a full row of the output."""

_MAX_TAIL = 4096
_SPLIT = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z"  # ECMA-48: CSI, the strings, other sequences
    rb"|(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"  # UTF-8
)
_RESETS = re.compile(rb"\x1bc|\x1b\[!p|\x1b\[[\d;]*r|\x1b\[\?(?:47|1047|1049)[hl]")
"""What ends a scrolling region: RIS, DECSTR, DECSTBM, and the alternate screen, which full-screen programs use."""

_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_WIDE = frozenset("WF")
"""Classes of characters that take two columns (Unicode: East Asian Width)."""

_ROW_BELOW = "\x1bD\x1b[A"
"""IND and CUU: the cursor keeps its place in the text, and is not on the last row."""
END = "\x1b7\x1b[r\x1b[9999;1H\x1b[0m\x1b[2K\x1b8\x1b[?25h"
"""No region, no row; and the cursor is visible, also if a program that had hidden it was killed."""


class BottomRow:
    """The row, as bytes for the terminal. One thread calls its methods: the one that writes to the terminal."""

    def __init__(
        self,
        text: Callable[[int], str],
        size: Callable[[], tuple[int, int] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text`: the row's text for a number of columns, escape sequences for colours not counted.

        `size`: columns and lines of the terminal; None: nothing may be drawn now.
        """
        self._text = text
        self._size = size
        self._clock = clock
        self._next_at = 0.0
        #: The size for which the region is set; None: it is not.
        self._region: tuple[int, int] | None = None
        self._shown = ""
        #: Whether there was output since the row was drawn: it may have cleared the screen.
        self._is_stale = True
        self._tail = b""
        #: The columns of the output since the last newline or carriage return, also over several rows.
        self._columns = 0
        self._split_at = float("inf")
        self._is_full_screen = False

    @property
    def seconds_left(self) -> float:
        """How long until the row is due to be drawn; a little more than nothing."""
        return max(0.001, self._next_at - self._clock())

    def wrote(self, data: bytes) -> None:
        """Note what was written to the terminal besides the row."""
        recent = self._tail[-16:] + data
        for match in _RESETS.finditer(recent):
            self._region = None
            if match[0][2:3] == b"?":
                self._is_full_screen = match[0].endswith(b"h")
        line_at = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._columns = _columns(data[line_at:]) + (0 if line_at else self._columns)
        self._tail = (self._tail + data[-_MAX_TAIL:])[-_MAX_TAIL:]
        self._is_stale = True

    def draw(self) -> bytes:
        """Return what draws the row, if it is due and has changed."""
        now = self._clock()
        if now < self._next_at:
            return b""
        self._next_at = now + INTERVAL_SECONDS
        size = self._size()
        if size is None or self._is_full_screen:
            self._region = None
            return b""
        if size[0] < MIN_COLUMNS or size[1] < MIN_LINES:
            return self.clear()
        if self._is_split(now, size[0]):
            return b""
        text = self._text(size[0] - 1)
        if size == self._region and text == self._shown and not self._is_stale:
            return b""
        found = f"{self._set_up(size)}\x1b7\x1b[1;{size[1] - 1}r\x1b[{size[1]};1H\x1b[0m{text}\x1b[0m\x1b[K\x1b8"
        self._region, self._shown, self._is_stale = size, text, False
        return found.encode("ascii", errors="backslashreplace")

    def _set_up(self, size: tuple[int, int]) -> str:
        if self._region is None:
            return _ROW_BELOW
        if self._region == size:
            return ""
        # The terminal may have wrapped and moved the old row, which is below the cursor in any case.
        return f"\x1b7\x1b[r\x1b8\x1b[J{_ROW_BELOW}"

    def _is_split(self, now: float, columns: int) -> bool:
        """Whether the output ends within a sequence or a character, or at the end of a row, and not for long.

        At the end of a row the cursor stays on its last character until the next one comes. Not all terminals restore
        that: tmux and pyte would put the next character in the place of the last.
        """
        is_full = self._columns > 0 and self._columns % columns == 0
        if not is_full and not _SPLIT.search(self._tail):
            self._split_at = float("inf")
            return False
        self._split_at = min(self._split_at, now)
        return now - self._split_at < SPLIT_SECONDS

    def clear(self) -> bytes:
        """Return what removes the row, if it is there."""
        if self._region is None:
            return b""
        self._region = None
        return END.encode()


def _columns(data: bytes) -> int:
    """Return how many columns a text takes, as far as one can tell without a terminal."""
    text = _SEQUENCE.sub(b"", data)
    if text.isascii():
        return len(text)
    found = text.decode(errors="replace")
    return len(found) + sum(unicodedata.east_asian_width(character) in _WIDE for character in found)
