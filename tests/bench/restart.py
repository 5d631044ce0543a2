"""From the SIGKILL of rank 1 until all ranks are past their first `all_reduce` of the next attempt.

2 agents x 2 workers, gloo. raylaunch restarts 20 times in a row in one job, twice; torchrun twice in one job, before
each of them. Once more torchrun with its own defaults, under which it may not recover at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raylaunch.core import journal
from raylaunch.core.actions import Launch
from raylaunch.core.events import WorkersExited, WorkersStarted
from raylaunch.core.journal import Entry
from tests.bench import contenders, figures
from tests.bench.contenders import RAYLAUNCH, TORCHRUN, Started, Task
from tests.bench.figures import SCRIPT_STATIONS, Figure, Outcome, Times
from tests.private_cluster import Cluster

RAYLAUNCH_DEATHS = 20
TORCHRUN_DEATHS = 2
ROUNDS = 2
_FIRST_START_SECONDS = 60.0
_RECOVERY_SECONDS = 30.0

_STATIONS = {
    "told": "the driver was told",
    "launched": "the next attempt is ordered",
    "started": "old workers gone, new ones forked, on all nodes",
    **SCRIPT_STATIONS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What came of the deaths of one job: seconds from each death that it survived."""

    deaths: int
    recoveries: tuple[Times, ...]


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    jobs: dict[str, list[Job]] = {RAYLAUNCH: [], TORCHRUN: []}
    for _ in range(ROUNDS):
        jobs[TORCHRUN].append(_torchrun(scratch))
        jobs[RAYLAUNCH].append(_raylaunch(cluster, scratch))
    recoveries = {name: [one for job in done for one in job.recoveries] for name, done in jobs.items()}
    defaults = _torchrun_defaults(scratch)
    figure = Figure(
        name="restart",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        raylaunch=tuple(one["passed"] for one in recoveries[RAYLAUNCH]),
        torchrun=tuple(one["passed"] for one in recoveries[TORCHRUN]),
        goal=">= 25 x",
        as_speedup=True,
    )
    return Outcome(
        figures=(figure,),
        details=(figures.stations("restart, seconds after the kill", _STATIONS, recoveries),),
        notes=(*(_count(name, done) for name, done in jobs.items()), f"torchrun, its defaults: {defaults}"),
        more={"recoveries": recoveries, "torchrun_defaults": defaults},
    )


def _count(name: str, jobs: Sequence[Job]) -> str:
    settings = ", TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" if name == TORCHRUN else ""
    parts = " and ".join(f"{len(job.recoveries)} of {job.deaths}" for job in jobs)
    return f"{name}{settings}: survived {parts} deaths in a row"


def _raylaunch(cluster: Cluster, scratch: Path) -> Job:
    task = Task(agents=2, workers=2, deaths=RAYLAUNCH_DEATHS)
    with contenders.raylaunch(cluster, scratch, task) as started:
        found = _recoveries(started)
        if not found or (len(found) == task.deaths and started.wait_for_end() != [0]):
            raise started.complaint("it did not end well")
        _, entries = journal.read(contenders.events_of(started).read_text().splitlines())
        told = _of_driver(started, entries)
    return Job(deaths=task.deaths, recoveries=tuple(told.get(number, {}) | one for number, one in enumerate(found)))


def _torchrun(scratch: Path) -> Job:
    task = Task(agents=2, workers=2, deaths=TORCHRUN_DEATHS)
    with contenders.torchrun(scratch, task) as started:
        found = _recoveries(started)
        if not found:
            raise started.complaint("no restart succeeded")
    return Job(deaths=task.deaths, recoveries=tuple(found))


def _torchrun_defaults(scratch: Path) -> str:
    """In words: one death with the store shared between attempts, which may hang or fail."""
    with contenders.torchrun(scratch, Task(agents=2, workers=2, deaths=1), share_store=True) as started:
        if not started.wait_for(0, _FIRST_START_SECONDS):
            return "did not start"
        if found := _recoveries(started):
            return f"recovered in {found[0]['passed']:.1f} s"
        if started.has_ended():
            return f"failed after {time.time() - (started.death(0) or started.began):.0f} s"
        return f"did not recover in {_RECOVERY_SECONDS:.0f} s"


def _recoveries(started: Started) -> list[Times]:
    """Watch the job through its deaths, until it has survived all or does not survive one."""
    if not started.wait_for(0, _FIRST_START_SECONDS):
        raise started.complaint("it did not start")
    found: list[Times] = []
    for generation in range(started.task.deaths):
        if not started.wait_for(generation + 1, _RECOVERY_SECONDS):
            break
        death = started.death(generation)
        assert death is not None, "the next generation began without a death"
        found.append(started.times(generation + 1, since=death))
    return found


def _of_driver(started: Started, entries: Sequence[Entry]) -> dict[int, Times]:
    """By generation: when the driver was told of its death, ordered the next attempt, and had it started.

    The attempt that follows the death of generation g is g + 2, unless something else failed as well. The order is
    given in the step that takes the news, so both have one time.
    """
    offset = _offset(started, entries)
    found: dict[int, Times] = {}
    for at, attempt, station in _turns(entries):
        death = started.death(attempt - 2)
        if death is not None:
            found.setdefault(attempt - 2, {})[station] = at + offset - death  # of several nodes, the last counts
    return found


def _turns(entries: Sequence[Entry]) -> Iterator[tuple[float, int, str]]:
    for entry in entries:
        if isinstance(entry.event, WorkersStarted):
            yield entry.event.at, entry.event.attempt, "started"
        for action in entry.actions:
            if isinstance(action, Launch) and isinstance(entry.event, WorkersExited):
                yield entry.event.at, action.attempt, "told"
                yield entry.event.at, action.attempt, "launched"


def _offset(started: Started, entries: Sequence[Entry]) -> float:
    """Wall clock less the driver's, taken at the death of rank 1 that was reported quickest.

    So that one report counts as if it had taken no time; it takes a millisecond or two.
    """
    pairs = [
        (started.death(failure.attempt - 1), failure.at)
        for entry in entries
        if isinstance(entry.event, WorkersExited)
        for failure in entry.event.failures
        if failure.rank == 1 and failure.signal == "SIGKILL" and not failure.stopped
    ]
    return max((death - at for death, at in pairs if death is not None), default=0.0)
