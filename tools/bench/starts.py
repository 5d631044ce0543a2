"""Starts of a job from nothing, and where their time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from raylaunch.core.machine.events_and_actions import NodeJoined, WorkersStarted
from tools.bench import contenders, figures
from tools.bench.contenders import DDP_SCRIPT, Started, Task
from tools.bench.figures import SCRIPT_STATIONS, Detail, Times

_START_SECONDS = 60.0

STATIONS = {
    "asked": "agents asked for",
    "up": "all agents up, torch imported in their fork servers",
    **SCRIPT_STATIONS,
}
STATIONS_OF_DDP = {**STATIONS, "passed": "... past its first optimizer step"}

Start = Callable[[], AbstractContextManager[Started]]


def in_turn(rounds: int, contestants: Mapping[str, Start]) -> dict[str, list[Times]]:
    """Start each contender this often, in turn. What is raylaunch's has its driver's stations too."""
    found: dict[str, list[Times]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, start in contestants.items():
            with start() as started:
                found[name].append(times(started))
    return found


def detail(title: str, task: Task, found: Mapping[str, list[Times]]) -> Detail:
    """Where the time of each contender goes."""
    names = STATIONS_OF_DDP if task.script == DDP_SCRIPT else STATIONS
    return figures.stations(f"{title}, seconds after the start of the command", names, found)


def passed(found: list[Times]) -> tuple[float, ...]:
    """Seconds until the last rank had passed, of each start."""
    return tuple(one["passed"] for one in found)


def times(started: Started) -> Times:
    """Seconds from the command's start to each station. The job must end well.

    The driver's clock begins when it asks for agents, and is laid over ours as if the fork were the script's first line.
    """
    if not started.wait_for(0, _START_SECONDS):
        raise started.complaint("it did not start")
    found = started.times(0, since=started.began)
    if any(code != 0 for code in started.wait_for_end()):
        raise started.complaint("it did not end well")
    log = contenders.log_of(started)
    if not log.entries:
        return found
    forked = max(event.at for _, event in log.events(WorkersStarted))
    joined = max(event.at for _, event in log.events(NodeJoined))
    asked = found["entered"] - forked
    return {"asked": asked, "up": asked + joined} | found
