"""A job that dies again and again: how each contender takes it through its deaths."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, timeline
from tools.bench.contenders import Started, Task
from tools.bench.figures import Samples, Times

_START_SECONDS = 120.0
_RECOVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What came of the deaths of one job: seconds from each death that it survived. `end`: how it did not."""

    deaths: int
    recoveries: tuple[Times, ...]
    end: str = ""


def raylaunch(cluster: Cluster, scratch: Path, task: Task, settings: Mapping[str, object] | None = None) -> Job:
    """It is to survive them all."""
    with contenders.raylaunch(cluster, scratch, task, settings) as started:
        job = _job(started, _RECOVERY_SECONDS)
        if job.end or started.wait_for_end() != [0]:
            raise started.complaint(f"it did not survive all: {job.end}")
        told = timeline.of_driver(started)
    recoveries = tuple(told.get(number, {}) | times for number, times in enumerate(job.recoveries))
    return Job(deaths=job.deaths, recoveries=recoveries)


def torchrun(scratch: Path, task: Task, *, share_store: bool = False) -> Job:
    """As many as it survives."""
    with contenders.torchrun(scratch, task, share_store=share_store) as started:
        return _job(started, _RECOVERY_SECONDS)


def ray_train(cluster: Cluster, scratch: Path, task: Task) -> Job:
    """As many as it survives; it takes its time."""
    with contenders.ray_train(cluster, scratch, task) as started:
        return _job(started, 2 * _RECOVERY_SECONDS)


def _job(started: Started, seconds: float) -> Job:
    """Watch it through its deaths, until it has survived all or does not survive one."""
    deaths = started.task.deaths
    if not started.wait_for(0, _START_SECONDS):
        return Job(deaths=deaths, recoveries=(), end=f"did not start: {started.complaint('its end')}")
    found: list[Times] = []
    for generation in range(deaths):
        if not started.wait_for(generation + 1, started.task.training(generation) + seconds):
            return Job(deaths=deaths, recoveries=tuple(found), end=_end(started, generation, seconds))
        death = started.death(generation)
        assert death is not None, "the next generation began without a death"
        found.append(started.times(generation + 1, since=death))
    return Job(deaths=deaths, recoveries=tuple(found))


def _end(started: Started, generation: int, seconds: float) -> str:
    death = started.death(generation)
    if death is None:
        return "ended before a death"
    return f"failed after {time.monotonic() - death:.0f} s" if started.has_ended() else f"hung for {seconds:.0f} s"


def samples(jobs: Sequence[Job]) -> Samples:
    """Seconds from each death until the last rank had passed; or in words that none was survived."""
    found = tuple(times["passed"] for job in jobs for times in job.recoveries)
    ends = sorted({re.split(" for | after |:", job.end)[0] for job in jobs if job.end})
    return found or f"{' or '.join(ends)}, {len(jobs)} of {len(jobs)}"


def notes(jobs: Mapping[str, Sequence[Job]]) -> tuple[str, ...]:
    """How many deaths each contender survived, which its samples do not say."""
    return tuple(f"{name}: survived {_parts(done)} deaths in a row" for name, done in jobs.items() if done)


def _parts(jobs: Sequence[Job]) -> str:
    return " and ".join(
        f"{len(job.recoveries)} of {job.deaths}{f' (then {job.end})' if job.end else ''}" for job in jobs
    )


def times(jobs: Mapping[str, Sequence[Job]]) -> dict[str, list[Times]]:
    """All recoveries of each contender."""
    return {name: [one for job in done for one in job.recoveries] for name, done in jobs.items()}
