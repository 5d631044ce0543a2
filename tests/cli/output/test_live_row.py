"""The row below the output: the output is shown as it would be in a terminal without it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raylaunch.cli.output.live_row import INTERVAL_SECONDS, MOVED_SECONDS, PARTIAL_SECONDS, LiveRow
from tests.terminal import pyte

BAR = "".join(f"{done}%|{'#' * done:20}| {done}/20\r" for done in range(20))
NESTED = "\router 1/2\n\rinner 1/9\x1b[A\router 2/2\n\rinner 2/9\x1b[A"
RICH = "\x1b[?25l\x1b[32mone\x1b[0m\ntwo" + "\r\x1b[2K\x1b[1A\x1b[2K\x1b[32monce\x1b[0m\ntwice" * 3 + "\n\x1b[?25h"
PIECES = st.sampled_from(
    [f"{BAR}\n", NESTED, RICH, "x" * 95, "line\n", "no newline", "\n\n\n", "\x1b[31m", "\x1b[0m", "é€"]
) | st.text("ab \n", max_size=90)


class Screen:
    """A terminal with a row, and one that has none. Both get the same output."""

    def __init__(self, columns: int = 40, lines: int = 8) -> None:
        self.now = 0.0
        self.size: tuple[int, int] | None = (columns, lines)
        self.label = "the row"
        self.row = LiveRow(lambda width: self.label[:width], lambda: self.size, clock=lambda: self.now)
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self.plain = pyte.HistoryScreen(columns, lines, history=1000)
        for screen in (self.screen, self.plain):
            screen.set_mode(pyte.modes.LNM)  # what a terminal's driver makes of a newline
        self.streams = [pyte.ByteStream(screen) for screen in (self.screen, self.plain)]

    def write(self, data: bytes) -> None:
        self.streams[0].feed(self.row.output(data))
        self.streams[1].feed(data)

    def draw(self, seconds: float = INTERVAL_SECONDS) -> bytes:
        self.now += seconds
        data = self.row.draw()
        self.streams[0].feed(data)
        return data

    def erase(self) -> None:
        self.streams[0].feed(self.row.erase())

    @property
    def rows(self) -> list[str]:
        return [row.strip() for row in self.screen.display]


def _text(screen: pyte.HistoryScreen) -> list[str]:
    width = screen.columns
    rows = [*("".join(row[column].data for column in range(width)) for row in screen.history.top), *screen.display]
    while rows and not rows[-1].strip():
        del rows[-1]
    return [row.rstrip() for row in rows]


@given(st.lists(PIECES, max_size=12))
def test_any_output_is_shown_as_without_the_row(pieces):
    """Whatever ends a piece: half a line, a bar, or a sequence that moves the cursor."""
    shown = Screen()
    shown.draw()
    for piece in pieces:
        shown.write(piece.encode())
        shown.draw()
    shown.write(b"\nend\n")
    shown.draw()
    shown.erase()
    assert _text(shown.screen) == _text(shown.plain)
    assert shown.screen.cursor.attrs == shown.plain.cursor.attrs


@given(st.lists(PIECES, max_size=5), st.lists(st.integers(0, 400), max_size=30))
@example(["no newline", BAR], [40])
def test_output_that_is_cut_anywhere(pieces, cuts):
    """Also within characters and escape sequences: nothing comes between their parts for a second.

    But not after a carriage return, where what is left of a longer line is erased.
    """
    data = "".join(pieces).encode()
    shown = Screen()
    shown.draw()
    inner = {cut for cut in cuts if cut < len(data) and data[:cut][-1:] != b"\r"}
    for start, end in pairwise(sorted({0, len(data), *inner})):
        shown.write(data[start:end])
        shown.draw(0.9 * PARTIAL_SECONDS)
    shown.write(b"\nend\n")
    shown.draw(MOVED_SECONDS)
    shown.erase()
    assert _text(shown.screen) == _text(shown.plain)


@pytest.mark.parametrize("end", ["\n", "\r", "prompt> ", "\x1b[32mgreen\x1b[0m"])
def test_the_row_is_below_the_cursor(end):
    """At the top of the screen, and at the bottom of one that scrolls."""
    shown = Screen()
    for number in range(12):
        shown.write(f"line {number}\n".encode())
        shown.draw()
        assert shown.rows[shown.screen.cursor.y + 1] == "the row"
    shown.write(f"last{end}".encode())
    shown.draw()
    shown.erase()
    shown.draw()
    assert shown.rows[shown.screen.cursor.y + 1] == "the row"
    assert sum("the row" in row for row in shown.rows) == 1
    assert "last" in "".join(shown.rows)
    assert shown.screen.cursor.x == shown.plain.cursor.x


def test_a_bar_is_replaced_by_another_line():
    """Nothing of the bar is left to the right of a shorter line; a newline ends the bar and leaves it."""
    shown = Screen()
    shown.write(b" 97%|#########| 58/60\r")
    shown.draw()
    shown.write(b"epoch done\n100%|##########| 60/60\r")
    shown.draw()
    shown.write(b"\nend\n")
    assert shown.rows[:3] == ["epoch done", "100%|##########| 60/60", "end"]


@given(st.integers(1, 200), st.integers(0, 200))
def test_rows_that_are_just_full(length, cut):
    """The next character goes to the next row, as it would without the row below."""
    shown = Screen()
    shown.draw()
    data = b"x" * length
    for part in (data[:cut], data[cut:], b"y"):
        shown.write(part)
        shown.draw()
    shown.erase()
    assert _text(shown.screen) == _text(shown.plain)


def test_nothing_is_drawn_without_a_change():
    """Nor while another row would be the same."""
    shown = Screen()
    assert shown.draw()
    assert not shown.draw()
    shown.label = "another"
    assert shown.row.seconds_left > 0
    assert shown.draw()
    shown.write(b"\x1b[2J\x1b[H")
    shown.draw(MOVED_SECONDS)
    assert shown.rows == ["", "another", *[""] * 6]


def test_a_program_that_moves_the_cursor_has_the_rows_below():
    """Nested bars are whole; the row comes back when they have been still for a while."""
    shown = Screen()
    shown.draw()
    shown.write(b"outer 1/2\n\rinner 1/9\x1b[A\r")
    assert not shown.draw(MOVED_SECONDS / 2)
    assert shown.rows[:2] == ["outer 1/2", "inner 1/9"]
    assert shown.draw(MOVED_SECONDS)


def test_a_program_that_writes_half_a_sequence_for_ever():
    """After a while the row is drawn all the same."""
    shown = Screen()
    shown.write("€".encode()[:2])
    assert not shown.draw(PARTIAL_SECONDS / 2)
    assert shown.draw(PARTIAL_SECONDS)


def test_another_process_writes_a_line():
    """It moves the cursor to the row, which is erased all the same."""
    shown = Screen()
    shown.draw()
    for stream in shown.streams:
        stream.feed(b"a warning of another process\n")
    shown.write(b"next\n")
    shown.draw()
    assert shown.rows[:4] == ["a warning of another process", "next", "", "the row"]
    assert sum("row" in row for row in shown.rows) == 1


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (20, 4), (25, 30), (41, 8), (40, 12)])
def test_a_resized_terminal(columns, lines):
    """The row is there once, below what was written before and after."""
    shown = Screen()
    shown.write(b"first\nsecond\n40%|####")
    shown.draw()
    shown.screen.resize(lines, columns)
    shown.size = columns, lines
    shown.draw()
    shown.write(b"##\nthird")
    shown.draw()
    rows = [row for row in shown.rows if row]
    assert rows in (
        ["first", "second", "40%|######", "third", "the row"],
        ["second", "40%|######", "third", "the row"],
        ["40%|######", "third", "the row"],
    )


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
    assert not any(shown.rows)


def test_no_row_without_text():
    """Nothing is known of the run yet."""
    shown = Screen()
    shown.label = ""
    assert not shown.draw()


def test_the_row_is_removed():
    """The cursor is where the output left it, and it is visible."""
    shown = Screen()
    shown.draw()
    shown.write(b"\x1b[?25lend")
    shown.draw(MOVED_SECONDS)
    shown.streams[0].feed(shown.row.close())
    assert "".join(shown.rows) == "end"
    assert (shown.screen.cursor.x, shown.screen.cursor.hidden) == (3, False)
    assert shown.row.erase() == b""
