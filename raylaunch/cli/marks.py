"""Errors that point: the place of every word of the job file and the command line, drawn with carets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raylaunch.core import secrets

if TYPE_CHECKING:
    import yaml


COMMAND_LINE = "command line"
_KEY = re.compile(r"""(\s*)["']?[^\s"'#:\[\]{}-][^"'#:]*["']?\s*:(?:\s|$)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stretch of one line. A place without a text stands for the whole source."""

    source: str
    line: int = 0
    """Counts from 1; 0 where there is only one line: the command line, a variable of the environment."""
    text: str = ""
    """The whole line, up to what is secret in it."""
    column: int = 0
    width: int = 1
    secret: bool = False
    """It points at what is not shown."""

    @property
    def order(self) -> tuple[float, bool, int]:
        """Lines of the file, the file as a whole, the environment and the command line."""
        return self.line or math.inf, self.source == COMMAND_LINE, self.column

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column + 1}" if self.line else self.source


Locate = Callable[["yaml.Node"], Place]


def in_file(title: str, text: str) -> Locate:
    """Finds the nodes of a file."""
    lines = text.rstrip().splitlines() or [""]
    ends = list(_ends(lines))

    def locate(node: yaml.Node) -> Place:
        line, column = node.start_mark.line, node.start_mark.column
        if line >= len(lines):  # what is missing at the end of a file is shown behind its last word
            line, column = len(lines) - 1, len(lines[-1])
        end = node.end_mark.column if node.end_mark.line == line else len(lines[line])
        place = Place(source=title, line=line + 1, text=lines[line], column=column, width=max(1, end - column))
        return _cut(place, ends[line])

    return locate


def _ends(lines: Sequence[str]) -> Iterator[int | None]:
    """Where each line must end, None for one that may be shown whole.

    A secret goes on until the next key that is not below its own, however its lines are indented.
    """
    above = None
    for line in lines:
        key = _KEY.match(line)
        if above is not None and (key is None or key.end(1) > above):
            yield len(line) - len(line.lstrip())
            continue
        end = secrets.secret_at(line)
        above = key.end(1) if key and end is not None else None
        yield end if end is not None and line[end:] else None


def _cut(place: Place, end: int | None) -> Place:
    """The place in a line that is shown up to there."""
    if end is None:
        return place
    text = place.text[:end] + secrets.HIDDEN
    column = min(place.column, end)
    return replace(
        place,
        text=text,
        column=column,
        width=max(1, min(place.width, len(text) - column)),
        secret=place.column >= end,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake, where it is, and what to do about it."""

    message: str
    place: Place
    hint: str = ""
    also: Place | None = None
    """A second place that has a part in it."""
    paths: tuple[tuple[str, ...], ...] = ()
    """The settings it is about, `()` for all of them; what follows from them is not reported again."""

    def __str__(self) -> str:
        shown = [(self.place, "-->", "^")] + ([(self.also, ":::", "-")] if self.also else [])
        margin = " " * max(len(str(place.line)) for place, _, _ in shown)
        lines = [f"error: {self.message}"]
        for place, arrow, caret in shown:
            lines.append(f"{margin}{arrow} {place}")
            if place.text:
                # Tabs and control characters would move the cursor away from the carets.
                text = "".join(char if char.isprintable() else " " for char in place.text)
                lines += [f"{margin} |", f"{str(place.line or '').rjust(len(margin))} | {text}"]
                lines += [f"{margin} | {' ' * place.column}{caret * place.width}"]
        return "\n".join([*lines, f"{margin} = {self.hint}"] if self.hint else lines)


def render(findings: Sequence[Finding]) -> str:
    """All findings in the order in which their sources are read, each once."""
    texts = map(str, sorted(findings, key=lambda finding: finding.place.order))
    return "\n\n".join(dict.fromkeys(texts))
