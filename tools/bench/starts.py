"""Starts of a job from nothing, and where their time goes."""

from __future__ import annotations

from raylaunch.core.machine.events_and_actions import NodeJoined, WorkersStarted
from raylaunch.core.record import journal
from tools.bench import contenders
from tools.bench.contenders import Started
from tools.bench.figures import SCRIPT_STATIONS, Times

_START_SECONDS = 60.0

STATIONS = {
    "asked": "agents asked for",
    "up": "all agents up, torch imported in their fork servers",
    **SCRIPT_STATIONS,
}
STATIONS_OF_DDP = {**STATIONS, "passed": "... past its first optimizer step"}


def times(started: Started) -> Times:
    """Seconds from the command's start to each station. The job must end well."""
    if not started.wait_for(0, _START_SECONDS):
        raise started.complaint("it did not start")
    found = started.times(0, since=started.began)
    if any(code != 0 for code in started.wait_for_end()):
        raise started.complaint("it did not end well")
    return found


def of_raylaunch(started: Started) -> Times:
    """With what its driver says.

    Its clock begins when it asks for agents, and is laid over ours as if the fork were the script's first line.
    """
    found = times(started)
    _, entries = journal.read(contenders.events_of(started).read_text().splitlines())
    events = [entry.event for entry in entries]
    forked = max(event.at for event in events if isinstance(event, WorkersStarted))
    joined = max(event.at for event in events if isinstance(event, NodeJoined))
    asked = found["entered"] - forked
    return {"asked": asked, "up": asked + joined} | found
