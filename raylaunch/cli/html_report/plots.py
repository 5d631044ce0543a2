"""Where the marks of the plots are, in percent of their width and height. The template draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raylaunch.core.history.run_history import NodeLife, RestartCost, RunHistory
from raylaunch.core.history.step_rates import StepRate
from raylaunch.core.history.time_per_state import StateSpan, TimeState
from raylaunch.core.text import count, duration

COLUMNS = 200
MOST_MARKS = 60
"""How many restarts are marked one by one; more of them are counted by place."""
_TICKS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200),
    *(86_400 * days for days in (1, 2, 5, 7, 14, 28, 56, 112, 365)),
)
_MOST_TICKS = 6
_MOST_TOLD = 200
"""Characters of a text that is shown when a mark is pointed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A rectangle, in percent, with a text that is shown when it is pointed at."""

    x: float
    width: float
    kind: str
    """The class by which it is coloured."""
    text: str = ""
    y: float = 0.0
    height: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotTick:
    """A label of an axis, at a place in percent."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A row of the timeline: one node, or many to which nothing happened."""

    name: str
    note: str
    marks: tuple[Mark, ...]


def time_ticks(seconds: float) -> list[PlotTick]:
    """Return the labels of the time axis of a run that took so long."""
    if seconds <= 0:
        return []
    step = next((step for step in _TICKS if seconds / step <= _MOST_TICKS), seconds)
    numbers = range(int(seconds / step * 0.93) + 1)
    return [PlotTick(at=100 * number * step / seconds, text=_tick(number * step)) for number in numbers]


def _tick(seconds: float) -> str:
    return "0" if seconds == 0 else f"{seconds:g} s" if seconds < 60 else duration(seconds)  # noqa: PLR2004


def state_marks(spans: Sequence[StateSpan], seconds: float) -> list[Mark]:
    """Return the states over time. Where there are too many to be seen, a column shows the part of each."""
    if seconds <= 0:
        return []
    if len(spans) <= COLUMNS:
        return [
            Mark(
                x=100 * span.begin / seconds,
                width=100 * (span.end - span.begin) / seconds,
                kind=str(span.state),
                text=f"{span.state}: {duration(span.end - span.begin)}, from {duration(span.begin)} on",
            )
            for span in spans
        ]
    return [mark for column in _columns(spans, seconds / COLUMNS) for mark in _column_marks(*column)]


def _columns(spans: Sequence[StateSpan], width: float) -> Iterator[tuple[int, dict[TimeState, float]]]:
    """Yield each column's number with the part of each state in it."""
    shares = [dict.fromkeys(TimeState, 0.0) for _ in range(COLUMNS)]
    for span in spans:
        for number, overlap in _overlaps(span.begin, span.end, width):
            shares[number][span.state] += overlap / width
    yield from enumerate(shares)


def _overlaps(begin: float, end: float, width: float) -> Iterator[tuple[int, float]]:
    """Yield each column that a time is in, with how much of the time is in it."""
    for number in range(min(COLUMNS - 1, int(begin / width)), min(COLUMNS - 1, int(end / width)) + 1):
        yield number, max(0.0, min(end, (number + 1) * width) - max(begin, number * width))


def _column_marks(number: int, shares: dict[TimeState, float]) -> Iterator[Mark]:
    text = ", ".join(f"{state} {share:.0%}" for state, share in shares.items() if share >= 0.005)  # noqa: PLR2004
    y = 100.0
    for state, share in shares.items():
        if share > 0:
            y -= 100 * share
            width = 100 / COLUMNS
            yield Mark(x=number * width, width=width, kind=str(state), text=text, y=max(0.0, y), height=100 * share)


def rate_ceiling(rates: Sequence[StepRate]) -> float:
    """Return the upper end of the axis of rates: a round number."""
    most = max((rate.per_second for rate in rates), default=0.0)
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(size * power for size in (1, 1.5, 2, 3, 4, 5, 7.5, 10) if most <= size * power * (1 + 1e-9))


def drawn_rates(rates: Sequence[StepRate], seconds: float) -> list[StepRate]:
    """Return the rates as they are drawn: if there are too many to be seen, the means of columns, pauses included."""
    if len(rates) <= COLUMNS:
        return list(rates)
    width, steps = seconds / COLUMNS, [0.0] * COLUMNS
    for rate in rates:
        for number, overlap in _overlaps(rate.begin, rate.end, width):
            steps[number] += overlap * rate.per_second
    return [
        StepRate(attempt=0, begin=number * width, end=(number + 1) * width, per_second=made / width)
        for number, made in enumerate(steps)
    ]


def rate_path(rates: Sequence[StepRate], seconds: float, ceiling: float) -> str:
    """Return the rates as the path of an SVG whose view box is 1000 by 100. Where no steps were made it is at 0."""
    if not rates or seconds <= 0:
        return ""
    parts: list[str] = []
    end = -1.0
    for rate in rates:
        left, right, y = 1000 * rate.begin / seconds, 1000 * rate.end / seconds, 100 * (1 - rate.per_second / ceiling)
        if left - end > 0.01:  # noqa: PLR2004
            parts.append(f"{'V100' if parts else ''}M{left:.2f} 100")
        parts.append(f"V{y:.2f}H{right:.2f}")
        end = right
    return "".join([*parts, "V100"])


def restart_marks(history: RunHistory) -> list[Mark]:
    """Return the places of restarts, at most about `MOST_MARKS`, with their causes."""
    if history.seconds <= 0:
        return []
    is_each = len(history.restarts) <= MOST_MARKS
    places: dict[int, list[RestartCost]] = {}
    for index, restart in enumerate(history.restarts):
        place = index if is_each else min(MOST_MARKS - 1, int(MOST_MARKS * restart.at / history.seconds))
        places.setdefault(place, []).append(restart)
    return [
        Mark(
            x=100 * found[0].at / history.seconds if is_each else 100 * (place + 0.5) / MOST_MARKS,
            width=0,
            kind="-".join(found[0].interruption.split()) if len({*_kinds(found)}) == 1 else "several",
            text=_restart_text(found),
        )
        for place, found in places.items()
    ]


def _kinds(restarts: Sequence[RestartCost]) -> Iterator[str]:
    return (str(restart.interruption) for restart in restarts)


def _restart_text(found: Sequence[RestartCost]) -> str:
    first = f"attempt {found[0].attempt}: {found[0].interruption}, {found[0].why}"[:_MOST_TOLD]
    return first if len(found) == 1 else f"{count(len(found), 'restart')}; {first}"


def node_rows(history: RunHistory, most: int) -> tuple[list[NodeRow], int]:
    """Return the rows of the timeline, and how many nodes to which something happened are left out.

    Nodes to which nothing happened share a row, unless there are few.
    """
    eventful = [node for node in history.nodes if node.is_eventful]
    quiet = [node for node in history.nodes if not node.is_eventful]
    if len(history.nodes) <= most:
        return [_row(node, history) for node in history.nodes], 0
    rows = [_row(node, history) for node in eventful[:most]]
    if quiet:
        first = min(quiet, key=lambda node: node.begin)
        marks = _row(first, history).marks
        rows.insert(0, NodeRow(name=count(len(quiet), "node"), note="nothing happened to them", marks=marks))
    return rows, max(0, len(eventful) - most)


def _row(node: NodeLife, history: RunHistory) -> NodeRow:
    end = history.seconds if node.left_at is None else node.left_at
    marks = [_mark("present", node.begin, end, history.seconds, f"{node.name} is there")]
    times = {attempt.number: attempt for attempt in history.attempts}
    for first, last in node.attempts:
        if first not in times or last not in times:
            continue
        until = times[last].ended_at
        text = f"attempt {first}" if first == last else f"attempts {first} to {last}"
        stop = min(end, history.seconds if until is None else until)
        marks.append(_mark("works", times[first].launched_at, stop, history.seconds, text))
    if node.draining_at is not None:
        marks.append(_mark("drains", node.draining_at, end, history.seconds, "it was being drained"))
    if node.left_at is not None:
        kind = "gone" if node.is_lost else "left"
        marks.append(_mark(kind, node.left_at, node.left_at, history.seconds, node.why_left[:_MOST_TOLD]))
    return NodeRow(name=str(node.name), note=_note(node), marks=tuple(marks))


def _mark(kind: str, begin: float, end: float, seconds: float, text: str) -> Mark:
    scale = 100 / seconds if seconds > 0 else 0.0
    return Mark(x=begin * scale, width=max(0.0, end - begin) * scale, kind=kind, text=text)


def _note(node: NodeLife) -> str:
    said = [node.address]
    said += [count(node.failures, "failure")] if node.failures else []
    if node.left_at is not None:
        said.append(f"{'lost' if node.is_lost else 'left'}: {node.why_left}"[:_MOST_TOLD])
    elif node.draining_at is not None:
        said.append("being drained")
    return ", ".join(part for part in said if part)
