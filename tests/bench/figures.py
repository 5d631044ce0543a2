"""Samples, ratios and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.bench.contenders import RAYLAUNCH, TORCHRUN
from tests.private_cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing measured of both: less is better. `what` says from which event to which."""

    name: str
    what: str
    unit: str
    raylaunch: tuple[float, ...]
    torchrun: tuple[float, ...]
    goal: str
    as_speedup: bool = False

    @property
    def ratio(self) -> float:
        """raylaunch's median to torchrun's; as a speed-up, the other way round."""
        ours, theirs = statistics.median(self.raylaunch), statistics.median(self.torchrun)
        return theirs / ours if self.as_speedup else ours / theirs

    def row(self) -> list[str]:
        """Its line of the table."""
        ratio = f"{self.ratio:.1f} x faster" if self.as_speedup else f"{self.ratio:.3f} x"
        return [self.name, *self._summary(self.raylaunch), *self._summary(self.torchrun), ratio, self.goal]

    def _summary(self, samples: Sequence[float]) -> list[str]:
        shown = ".0f" if self.unit == "MB" else ".3f"
        median, worst = statistics.median(samples), max(samples)
        return [f"{median:{shown}} {self.unit}", f"{worst:{shown}}", str(len(samples))]

    def record(self) -> dict[str, Any]:
        """For bench.json."""
        return {
            "what": self.what,
            "unit": self.unit,
            "goal": self.goal,
            "ratio": self.ratio,
            "ratio_is": "torchrun / raylaunch" if self.as_speedup else "raylaunch / torchrun",
            **{name: _record(getattr(self, name)) for name in (RAYLAUNCH, TORCHRUN)},
        }


def _record(samples: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(samples), "worst": max(samples), "samples": list(samples)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """A table below the table: where the time or the memory goes. The first of `columns` heads the row names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Times = dict[str, float]
"""Seconds to each station, from what the figure starts at; without those that the contender does not tell of."""

SCRIPT_STATIONS = {
    "entered": "the last rank is at the script's first line",
    "imported": "... past `import torch`",
    "joined": "... past `init_process_group`",
    "passed": "... past its first `all_reduce`",
}
"""What `unchanged.py` writes down."""


def stations(title: str, names: Mapping[str, str], times: Mapping[str, Sequence[Times]]) -> Detail:
    """How far each station is from the start, for both contenders."""
    return Detail(
        title=f"{title} (medians):",
        columns=("", RAYLAUNCH, "worst", TORCHRUN, "worst"),
        rows=tuple(
            (words, *_station(times[RAYLAUNCH], name), *_station(times[TORCHRUN], name))
            for name, words in names.items()
        ),
    )


def _station(times: Sequence[Times], name: str) -> tuple[str, str]:
    known = [one[name] for one in times if name in one]
    return (f"{statistics.median(known):.3f}", f"{max(known):.3f}") if known else ("-", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that a bench has to say."""

    figures: tuple[Figure, ...]
    details: tuple[Detail, ...] = ()
    notes: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    """Further numbers for bench.json."""


class Bench(Protocol):
    """A module of this package that measures one thing."""

    def measure(self, cluster: Cluster, scratch: Path) -> Outcome:
        """Run the contenders in turn."""


_HEAD = ("", RAYLAUNCH, "worst", "n", TORCHRUN, "worst", "n", "ratio", "goal")


def text(outcomes: Sequence[Outcome]) -> str:
    """The one table, and below it the details and notes of each bench."""
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    lines = aligned([list(_HEAD), *(figure.row() for figure in figures)])
    lines += ["", *(f"{figure.name}: {figure.what}" for figure in figures)]
    for outcome in outcomes:
        for detail in outcome.details:
            lines += ["", detail.title, *aligned([list(detail.columns), *map(list, detail.rows)])]
        lines += ["", *outcome.notes] if outcome.notes else []
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first to the left and the others to the right, with a rule below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return [f"  {line.rstrip()}" for line in (lines[0], "-" * len(lines[0]), *lines[1:])]
