"""Errors that point: the place of every word of the job file and the command line, drawn with carets."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stretch of one line. A place without a line stands for the whole source."""

    source: str
    line: int = 0
    """Counts from 1; 0 for a source without line numbers."""
    text: str | None = None
    """The whole line, None for the whole source."""
    column: int = 0
    width: int = 1
    rank: int = 0
    """Sources are reported in this order."""

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts places as they are read, the source as a whole after its lines."""
        return self.rank, math.inf if self.text is None else self.line, self.column

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column + 1}" if self.line else self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake, where it is, and what to do about it."""

    message: str
    place: Place | None = None
    hint: str = ""
    also: Place | None = None
    """A second place that has a part in it."""
    keys: frozenset[str] = field(default_factory=frozenset)
    """The settings it is about; what follows from them is not reported again."""

    def __str__(self) -> str:
        places = [self.place] if self.place else []
        if self.also:
            places.append(self.also)
        margin = " " * max((len(str(place.line)) for place in places), default=1)
        lines = [f"error: {_printable(self.message)}"]
        for index, spot in enumerate(_joined(places)):
            lines += _snippet(spot, margin, arrow=":::" if index else "-->", main=self.place)
        if self.hint:
            lines.append(f"{margin} = {_printable(self.hint)}")
        return "\n".join(lines)


def render(findings: list[Finding]) -> str:
    """All findings in the order in which the sources are read."""
    ordered = sorted(findings, key=lambda finding: finding.place.order if finding.place else (0, math.inf, 0))
    return "\n\n".join(map(str, ordered))


def _joined(places: list[Place]) -> list[list[Place]]:
    """Places of one source together, the source of the first place first."""
    sources = list(dict.fromkeys(place.source for place in places))
    return [[place for place in places if place.source == source] for source in sources]


def _snippet(places: list[Place], margin: str, *, arrow: str, main: Place | None) -> list[str]:
    lines = [f"{margin}{arrow} {places[0]}"]
    shown = sorted((place for place in places if place.text is not None), key=lambda place: place.order)
    if shown:
        lines.append(f"{margin} |")
    last = None
    for (number, text), marked in groupby(shown, key=lambda place: (place.line, str(place.text))):
        if last is not None and number > last + 1:
            lines.append("...")
        last = number
        lines.append(f"{str(number or '').rjust(len(margin))} | {_printable(text)}".rstrip())
        lines.append(f"{margin} | {_carets(text, list(marked), main)}")
    return lines


def _carets(text: str, places: list[Place], main: Place | None) -> str:
    row = ""
    for place in places:
        start = _cells(text[: place.column])
        width = max(1, _cells(text[place.column : place.column + place.width]))
        row = row.ljust(start) + ("^" if place == main else "-") * width
    return row


def _printable(text: str) -> str:
    """Control characters would move the cursor away from the carets."""
    return "".join(char if char.isprintable() else " " for char in text)


def _cells(text: str) -> int:
    """Terminal columns: East Asian letters and emoji take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)
