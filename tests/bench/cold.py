"""From the start of the command until all ranks are past their first `all_reduce`.

2 agents x 2 workers, gloo, five times each in turn. raylaunch meets a Ray cluster that is running already, as its
users have; torchrun needs nothing but its two commands.
"""

from __future__ import annotations

from pathlib import Path

from raylaunch.core import journal
from raylaunch.core.events import NodeJoined, WorkersStarted
from tests.bench import contenders, figures
from tests.bench.contenders import RAYLAUNCH, TORCHRUN, Started, Task
from tests.bench.figures import SCRIPT_STATIONS, Figure, Outcome, Times
from tests.private_cluster import Cluster

ROUNDS = 5
_START_SECONDS = 60.0
_TASK = Task(agents=2, workers=2)

_STATIONS = {
    "asked": "connected to Ray, agents asked for",
    "joined_nodes": "all agents up, torch imported in their fork servers",
    **SCRIPT_STATIONS,
}


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    starts: dict[str, list[Times]] = {RAYLAUNCH: [], TORCHRUN: []}
    for _ in range(ROUNDS):
        with contenders.torchrun(scratch, _TASK) as started:
            starts[TORCHRUN].append(_start(started))
        with contenders.raylaunch(cluster, scratch, _TASK) as started:
            times = _start(started)
            starts[RAYLAUNCH].append(_of_driver(started, times) | times)
    figure = Figure(
        name="cold",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        raylaunch=tuple(times["passed"] for times in starts[RAYLAUNCH]),
        torchrun=tuple(times["passed"] for times in starts[TORCHRUN]),
        goal="<= 1.0 x",
    )
    detail = figures.stations("cold, seconds after the start of the command", _STATIONS, starts)
    return Outcome(figures=(figure,), details=(detail,), more={"starts": starts})


def _start(started: Started) -> Times:
    if not started.wait_for(0, _START_SECONDS):
        raise started.complaint("it did not start")
    found = started.times(0, since=started.began)
    if any(code != 0 for code in started.wait_for_end()):
        raise started.complaint("it did not end well")
    return found


def _of_driver(started: Started, times: Times) -> Times:
    """Its clock begins when it asks for agents, and is laid over ours as if the fork were the script's first line."""
    _, entries = journal.read(contenders.events_of(started).read_text().splitlines())
    events = [entry.event for entry in entries]
    forked = max(event.at for event in events if isinstance(event, WorkersStarted))
    joined = max(event.at for event in events if isinstance(event, NodeJoined))
    asked = times["entered"] - forked
    return {"asked": asked, "joined_nodes": asked + joined}
