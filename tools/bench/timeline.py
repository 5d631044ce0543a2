"""Where the time of raylaunch's restarts goes: the script's marks and the driver's events.jsonl on one clock.

All processes of a machine share CLOCK_MONOTONIC, so nothing is guessed. Of several nodes or ranks, the last counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from raylaunch.core.machine.events_and_actions import Launch, WorkersExited, WorkersStarted
from tools.bench import contenders
from tools.bench.contenders import Started
from tools.bench.event_log import EventLog
from tools.bench.figures import Detail, Times

STATIONS = {
    "told": "told: the driver knows of the death",
    "ordered": "ordered: it has decided, and the fork servers have its order",
    "killed": "killed: nothing is left of the old attempt",
    "forked": "forked: all new workers",
    "entered": "entered: the last rank is at the script's first line",
    "imported": "imported: torch",
    "joined": "joined: `init_process_group`",
    "reduced": "reduced: the first `all_reduce`",
    "passed": "stepped: the first optimizer step",
}
WITHOUT_STEP = {name: words for name, words in STATIONS.items() if name != "passed"}
"""Of a script without an optimizer."""
_BAR = 40


def of_driver(started: Started) -> dict[int, Times]:
    """By generation: seconds from its death to what driver and nodes noted of the attempt that came up after it."""
    log = contenders.log_of(started)
    found: dict[int, Times] = {}
    for generation in range(started.task.deaths):
        death = started.death(generation)
        if death is not None and started.has_passed(generation + 1):
            passed = death + started.times(generation + 1, since=death)["passed"]
            found[generation] = _between(log, death, passed)
    return found


def _between(log: EventLog, death: float, passed: float) -> Times:
    then = [entry for entry in log.entries if entry.event and death <= log.clock + entry.event.at <= passed]
    told = [at for at, _ in log.events(WorkersExited) if death <= at <= passed]
    attempts = [action.attempt for entry in then for action in entry.actions if isinstance(action, Launch)]
    timings = [
        event.timings for _, event in log.events(WorkersStarted) if event.attempt in attempts[-1:] and event.timings
    ]
    times = {"told": told[0]} if told else {}
    if timings:
        times["ordered"] = max(one.ordered for one in timings)
        times["killed"] = max(one.ended for one in timings)
        times["forked"] = max(one.forked for one in timings)
    return {name: at - death for name, at in times.items()}


def breakdown(title: str, recoveries: Sequence[Times], stations: Mapping[str, str] = STATIONS) -> Detail:
    """A small time line: when the median restart comes past what, how long that takes, and what the slowest took."""
    whole = [times for times in recoveries if set(stations) <= set(times)]
    rows = _rows(whole, stations) if whole else ()
    return Detail(title=title, columns=("", "at", "takes", "worst", "in the slowest", ""), rows=rows)


def _rows(recoveries: Sequence[Times], stations: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    slowest = max(recoveries, key=lambda times: times["passed"])
    ends = {name: statistics.median(times[name] for times in recoveries) for name in stations}
    rows, before, end = [], None, ends[[*stations][-1]]
    for name, words in stations.items():
        took = [times[name] - (times[before] if before else 0.0) for times in recoveries]
        begin = ends[before] if before else 0.0
        before_slowest = slowest[before] if before else 0.0
        cells = (ends[name], statistics.median(took), max(took), slowest[name] - before_slowest)
        rows.append((words, *(f"{1000 * cell:.1f}" for cell in cells), _bar(begin, ends[name], end)))
        before = name
    return tuple(rows)


def _bar(begin: float, end: float, whole: float) -> str:
    low, high = (round(_BAR * max(0.0, at) / whole) for at in (begin, end))
    return ("." * low + "#" * (high - low)).ljust(_BAR, ".")
