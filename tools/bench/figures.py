"""What a bench has to say: samples of the contenders, goals, and where the time goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.private_cluster import Cluster
from tools.bench.contenders import RAYLAUNCH, TORCHRUN

Samples = tuple[float, ...] | str
"""One number for each time it was measured; words where there are none: `hung 1 of 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing measured of several contenders, not all of them in each. `what`: from which event to which.

    Less is better, unless `more_is_better`.
    """

    name: str
    what: str
    unit: str
    samples: Mapping[str, Samples]
    goals: tuple[Goal, ...] = ()
    more_is_better: bool = False

    def of(self, contender: str) -> tuple[float, ...]:
        """Its samples, none where it has only words."""
        samples = self.samples.get(contender, ())
        return () if isinstance(samples, str) else tuple(samples)

    def median(self, contender: str) -> float | None:
        """Of its samples."""
        samples = self.of(contender)
        return statistics.median(samples) if samples else None

    def worst(self, contender: str) -> float | None:
        """Of its samples."""
        samples = self.of(contender)
        return (min if self.more_is_better else max)(samples, default=None)

    def times_better(self, peer: str) -> float | None:
        """How many times the peer's median is worse than ours."""
        ours, theirs = self.median(RAYLAUNCH), self.median(peer)
        if ours is None or theirs is None:
            return None
        better, worse = (theirs, ours) if self.more_is_better else (ours, theirs)
        return worse / better if better else None

    def record(self) -> dict[str, Any]:
        """For bench.json, and for the tables, which are made of such records."""
        peers = [name for name in self.samples if name != RAYLAUNCH]
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "contenders": {name: self._contender(name) for name in self.samples},
            "times_better": {name: self.times_better(name) for name in peers},
            "goals": [{"goal": goal.words, "value": goal.value(self), "met": goal.met(self)} for goal in self.goals],
        }

    def _contender(self, name: str) -> dict[str, Any] | str:
        samples = self.samples[name]
        if isinstance(samples, str) or not samples:
            return samples if isinstance(samples, str) and samples else "-"
        return {"median": self.median(name), "worst": self.worst(name), "samples": list(samples)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound for something that a figure says of raylaunch: a ceiling, or with `is_floor` a floor."""

    words: str
    bound: float
    value: Callable[[Figure], float | None]
    is_floor: bool = False

    def met(self, figure: Figure) -> bool | None:
        """None: what it needs was not measured."""
        value = self.value(figure)
        if value is None:
            return None
        return value >= self.bound if self.is_floor else value <= self.bound


def times_better(bound: float, peer: str = TORCHRUN) -> Goal:
    """The peer's median is at least this many times ours."""
    words = f">= {bound:g} x {peer}"
    return Goal(words=words, bound=bound, value=lambda figure: figure.times_better(peer), is_floor=True)


def ratio(bound: float, peer: str = TORCHRUN) -> Goal:
    """Our median is at most this many times the peer's."""

    def value(figure: Figure) -> float | None:
        ours, theirs = figure.median(RAYLAUNCH), figure.median(peer)
        return None if ours is None or not theirs else ours / theirs

    return Goal(words=f"<= {bound:g} x {peer}", bound=bound, value=value)


def more_at_most(bound: float, peer: str) -> Goal:
    """Our median is at most this much more than the peer's, in the figure's unit."""

    def value(figure: Figure) -> float | None:
        ours, theirs = figure.median(RAYLAUNCH), figure.median(peer)
        return None if ours is None or theirs is None else ours - theirs

    return Goal(words=f"<= {peer} + {bound:g}", bound=bound, value=value)


def median_at_most(bound: float) -> Goal:
    """Our median, in the figure's unit."""
    return Goal(words=f"median <= {bound:g}", bound=bound, value=lambda figure: figure.median(RAYLAUNCH))


def median_at_least(bound: float) -> Goal:
    """Our median, in the figure's unit."""
    return Goal(words=f"median >= {bound:g}", bound=bound, value=lambda figure: figure.median(RAYLAUNCH), is_floor=True)


def worst_at_most(bound: float) -> Goal:
    """Our worst, in the figure's unit."""
    return Goal(words=f"worst <= {bound:g}", bound=bound, value=lambda figure: figure.worst(RAYLAUNCH))


def worst_to_median(bound: float) -> Goal:
    """Our worst is at most this many times our median."""

    def value(figure: Figure) -> float | None:
        worst, median = figure.worst(RAYLAUNCH), figure.median(RAYLAUNCH)
        return None if worst is None or not median else worst / median

    return Goal(words=f"worst <= {bound:g} x med.", bound=bound, value=value)


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
    "reduced": "... past its first `all_reduce`",
}
"""What `unchanged.py` writes down."""


def stations(title: str, names: Mapping[str, str], times: Mapping[str, Sequence[Times]]) -> Detail:
    """How far each station is from the start, for each contender."""
    return Detail(
        title=f"{title} (medians):",
        columns=("", *(head for contender in times for head in (contender, "worst"))),
        rows=tuple(
            (words, *(cell for found in times.values() for cell in _station(found, name)))
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


def first_line(doc: str | None) -> str:
    """The first line of a bench's docstring, which says from which event to which is measured."""
    return (doc or "").split("\n", 1)[0]


Size = TypeVar("Size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(Generic[Size]):
    """What measures one thing, or a few of one kind.

    `measure` gets a Ray cluster, a folder for its files, and how much to do: `full`, or `smoke` with `--smoke`, by which
    one sees within seconds that the bench runs. One without `needs_cluster` is measured before there is a Ray cluster;
    it gets None.
    """

    measure: Callable[[Cluster, Path, Size], Outcome]
    full: Size
    smoke: Size
    needs_cluster: bool = True
