"""The row at the bottom of a terminal: the output is shown as it would be in a terminal without it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cli.output.bottom_row import INTERVAL_SECONDS, SPLIT_SECONDS, BottomRow
from tests.terminal import pyte

TQDM = "".join(f"\r{done}%|{'#' * done:20}| {done}/20" for done in range(20))
NESTED = "\router 1/2\n\rinner 1/9\x1b[A\router 2/2\n\rinner 2/9\x1b[A"
RICH = "\x1b[?25l\x1b[32mone\x1b[0m\ntwo" + "\r\x1b[2K\x1b[1A\x1b[2K\x1b[32monce\x1b[0m\ntwice" * 3 + "\n\x1b[?25h"
PIECES = st.sampled_from(
    [
        TQDM,
        NESTED,
        RICH,
        "x" * 95,
        "line\n",
        "no newline",
        "\r",
        "\n\n\n",
        "\x1b[A",
        "\x1b[B",
        "\x1b[2K",
        "\x1b[31m",
        "é€",
    ]
) | st.text("ab \n\r", max_size=90)


class Screen:
    """A terminal with a row, and one with a line less that has none. Both get the same output."""

    def __init__(self, columns: int = 40, lines: int = 8) -> None:
        self.now = 0.0
        self.size: tuple[int, int] | None = (columns, lines)
        self.label = "the row"
        self.row = BottomRow(lambda width: self.label[:width], lambda: self.size, lambda: self.now)
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self.plain = pyte.HistoryScreen(columns, lines - 1, history=1000)
        for screen in (self.screen, self.plain):
            screen.set_mode(pyte.modes.LNM)  # what a terminal's driver makes of a newline
        self._streams = [pyte.ByteStream(screen) for screen in (self.screen, self.plain)]

    def write(self, data: bytes) -> None:
        for stream in self._streams:
            stream.feed(data)
        self.row.wrote(data)

    def draw(self, seconds: float = INTERVAL_SECONDS) -> bytes:
        self.now += seconds
        data = self.row.draw()
        self._streams[0].feed(data)
        return data

    def clear(self) -> None:
        self._streams[0].feed(self.row.clear())

    def check(self) -> None:
        assert self.screen.display[:-1] == self.plain.display
        assert (self.screen.cursor.x, self.screen.cursor.y) == (self.plain.cursor.x, self.plain.cursor.y)
        assert self.screen.cursor.attrs == self.plain.cursor.attrs
        assert len(self.screen.history.top) == len(self.plain.history.top)


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 400), max_size=30))
def test_any_output_is_shown_as_without_the_row(pieces, cuts):
    """At whatever places the output is cut, also within characters and escape sequences."""
    data = "".join(pieces).encode()
    shown = Screen()
    shown.draw()
    for start, end in pairwise(sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})):
        shown.write(data[start:end])
        shown.draw()
        shown.check()
    shown.draw(2 * SPLIT_SECONDS)
    shown.check()
    assert shown.screen.display[-1].strip() == "the row"


@given(st.integers(1, 200), st.integers(0, 200))
def test_rows_that_are_just_full(length, cut):
    """The next character goes to the next row, as it would without the row at the bottom."""
    shown = Screen()
    shown.draw()
    data = b"x" * length
    for part in (data[:cut], data[cut:], b"y"):
        shown.write(part)
        shown.draw()
        shown.check()


def test_nothing_is_drawn_without_a_change():
    """Nor more often than the interval."""
    shown = Screen()
    assert shown.draw()
    assert not shown.draw()
    shown.label = "another"
    assert not shown.draw(0.0)
    assert shown.draw()
    shown.write(b"\x1b[2J\x1b[H")
    shown.draw()
    assert shown.screen.display[-1].strip() == "another"


def test_a_program_that_writes_half_a_sequence_for_ever():
    """After a while the row is drawn all the same."""
    shown = Screen()
    shown.write(b"\x1b[3")
    assert not shown.draw()
    assert not shown.draw(SPLIT_SECONDS / 2)
    assert shown.draw(SPLIT_SECONDS)


def test_the_first_row_on_a_full_screen():
    """The output moves up by one line, and loses nothing."""
    shown = Screen(lines=5)
    shown.write(b"".join(b"%d\n" % number for number in range(9)) + b"last")
    shown.draw()
    shown.write(b"!\nnext")
    shown.draw()
    assert [row.strip() for row in shown.screen.display] == ["7", "8", "last!", "next", "the row"]
    assert [row[0].data for row in shown.screen.history.top] == [*"0123456"]


@pytest.mark.parametrize("reset", [b"\x1bc", b"\x1b[r", b"\x1b[!p", b"\x1b[?1049h\x1b[r\x1b[?1049l"])
def test_output_that_resets_the_terminal(reset):
    """Then the row is drawn as at first, also if the cursor has come to the last line."""
    shown = Screen(lines=5)
    shown.draw()
    shown.write(reset)
    shown.write(b"\x1b[H" + b"".join(b"line %d\n" % number for number in range(9)) + b"end")
    shown.draw()
    shown.write(b"\nmore\nand more")
    shown.draw()
    assert [row.strip() for row in shown.screen.display][1:] == ["end", "more", "and more", "the row"]


def test_a_full_screen_program_is_left_alone():
    """It has the whole terminal until it leaves the alternate screen."""
    shown = Screen()
    shown.write(b"\x1b[?10")
    shown.write(b"49h")
    assert not shown.draw()
    shown.write(b"\x1b[?1049l")
    assert shown.draw()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (20, 4), (25, 30), (41, 8), (40, 12)])
def test_a_resized_terminal(columns, lines):
    """The row is at the new bottom, once, and what was written before and after is there."""
    shown = Screen()
    shown.write(b"first\nsecond\n40%|####")
    shown.draw()
    shown.screen.resize(lines, columns)
    shown.screen.set_margins()
    shown.size = columns, lines
    shown.draw()
    shown.write(b"##\nthird")
    shown.draw()
    rows = [row.strip() for row in shown.screen.display]
    assert rows[-1] == "the row"
    assert "\n".join(rows[:-1]).strip() in (
        "first\nsecond\n40%|######\nthird",
        "second\n40%|######\nthird",
        "40%|######\nthird",
    )
    assert sum("row" in row for row in rows) == 1


def test_no_row_in_the_background_or_in_a_tiny_terminal():
    """What is drawn would be on the row of the shell's prompt."""
    shown = Screen()
    shown.size = None
    assert not shown.draw()
    shown.size = 19, 8
    assert not shown.draw()
    shown.size = 40, 8
    assert shown.draw()
    shown.size = 40, 3
    shown.draw()
    assert shown.screen.margins is None


def test_the_row_is_removed():
    """The whole terminal scrolls again, the cursor is where the output left it, and it is visible."""
    shown = Screen()
    shown.draw()
    shown.write(b"\x1b[?25lend")
    shown.draw()
    shown.clear()
    assert shown.screen.margins is None
    assert "".join(shown.screen.display).strip() == "end"
    assert (shown.screen.cursor.x, shown.screen.cursor.hidden) == (3, False)
    assert shown.row.clear() == b""
