"""From the SIGKILL of rank 1 until all ranks are past a station of the next attempt: five scripts, one way to measure.

2 agents x 2 workers, gloo. A script trains for some seconds before the first death, and for fewer before each other one.
raylaunch restarts many times in a row in one job; torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 twice, in turn with
it; torchrun with its own defaults, under which it may not recover at all, up to twice; and Ray Train v2 twice, on the same
running cluster (`ray_train.py` says with which settings).

restart          the script without a model, until its first `all_reduce`
restart-ddp      a DDP model of 2.6 million parameters (10 MB) and Adam, until the first optimizer step
restart-heavy    a script that imports pandas and scikit-learn besides torch, with `preload: auto`, which learns in the
                 first attempt what the script imports. All restarts count, whether it was done learning or not
restart-state    100 MB of `State` on each rank, until a new step. Under torchrun rank 0 writes the state to tmpfs with
                 `torch.save` after each step
restart-elastic  the same with `elastic`, where the other three ranks stay; without `elastic`, where all are started again;
                 and torchrun, whose rank 0 writes to tmpfs each 20 steps. Then with a script that prepares itself for
                 5 s: when the survivors have left the attempt before, and when all have done a new step
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, figures, timeline
from tools.bench.contenders import (
    ALL_ANEW,
    DDP_SCRIPT,
    ELASTIC_SCRIPT,
    HEAVY_SCRIPT,
    RAY_TRAIN,
    RAYLAUNCH,
    SCRIPT,
    STATE_SCRIPT,
    TORCHRUN,
    TORCHRUN_DEFAULTS,
    Started,
    Task,
)
from tools.bench.figures import SCRIPT_STATIONS, Bench, Figure, Goal, Outcome, Samples, Times

_START_SECONDS = 120.0
_RECOVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`turns`: the contenders, in the order in which each runs a job. `deaths`: in a job of raylaunch, and of the others."""

    turns: tuple[str, ...]
    deaths: tuple[int, int]
    first: float = 3.0
    """Seconds of training before the first death."""
    agents: int = 2
    prepared: tuple[int, float] = (0, 0.0)
    """Deaths of a job whose script prepares itself, and for how many seconds it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One of the scripts, and what its table says."""

    name: str
    what: str
    script: Path
    goals: tuple[Goal, ...]
    each: float = 0.4
    """Seconds of training before each death but the first."""
    settings: Mapping[str, object] = field(default_factory=dict)
    stations: Mapping[str, str]
    phases: Mapping[str, str] = field(default_factory=lambda: timeline.STATIONS)

    def measure(self, cluster: Cluster, scratch: Path, size: Size) -> Outcome:
        """Run the contenders in turn."""
        ours, theirs = (
            Task(agents=size.agents, workers=2, deaths=deaths, first=size.first, each=self.each, script=self.script)
            for deaths in size.deaths
        )
        jobs: dict[str, list[Job]] = {name: [] for name in (RAYLAUNCH, *size.turns)}
        for name in size.turns:
            jobs[name].append(
                _run(name, cluster, scratch, ours if name in (RAYLAUNCH, ALL_ANEW) else theirs, self.settings)
            )
        times = {name: [one for job in done for one in job.recoveries] for name, done in jobs.items()}
        of_all = {name: samples(done) for name, done in jobs.items()}
        found = [Figure(name=self.name, what=self.what, unit="s", samples=of_all, goals=self.goals)]
        notes = [f"{name}: survived {_parts(done)} deaths in a row" for name, done in jobs.items()]
        if size.prepared[0]:
            figure, note = _survivors_back(cluster, scratch, ours, *size.prepared)
            found.append(figure)
            notes.append(note)
        shown = {name: each for name, each in times.items() if name != TORCHRUN_DEFAULTS}
        details = (
            figures.stations(f"{self.name}, seconds after the kill", self.stations, shown),
            timeline.breakdown(
                f"{self.name}, raylaunch's, milliseconds after the kill:", times[RAYLAUNCH], self.phases
            ),
        )
        first = f"the first restart of raylaunch took {times[RAYLAUNCH][0]['passed']:.2f} s"
        return Outcome(figures=tuple(found), details=details, notes=(*notes, first), more={"recoveries": times})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What came of the deaths of one job: seconds from each death that it survived. `end`: how it did not."""

    deaths: int
    recoveries: tuple[Times, ...]
    end: str = ""


def _run(name: str, cluster: Cluster, scratch: Path, task: Task, settings: Mapping[str, object]) -> Job:
    """Run one job of a contender."""
    match name:
        case contenders.RAYLAUNCH:
            return raylaunch(cluster, scratch, task, settings)
        case contenders.ALL_ANEW:
            return raylaunch(cluster, scratch, replace(task, options=("--anew",)), settings)
        case contenders.RAY_TRAIN:
            return ray_train(cluster, scratch, task)
        case _:
            with contenders.torchrun(scratch, task, share_store=name == TORCHRUN_DEFAULTS) as started:
                return _job(started, _RECOVERY_SECONDS)


def raylaunch(cluster: Cluster, scratch: Path, task: Task, settings: Mapping[str, object] | None = None) -> Job:
    """It is to survive them all."""
    with contenders.raylaunch(cluster, scratch, task, settings) as started:
        job = _job(started, _RECOVERY_SECONDS)
        if job.end or started.wait_for_end() != [0]:
            raise started.complaint(f"it did not survive all: {job.end}")
        told = timeline.of_driver(started)
    recoveries = tuple(told.get(number, {}) | times for number, times in enumerate(job.recoveries))
    return Job(deaths=job.deaths, recoveries=recoveries)


def ray_train(cluster: Cluster, scratch: Path, task: Task) -> Job:
    """It takes its time."""
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


def _parts(jobs: Sequence[Job]) -> str:
    return " and ".join(
        f"{len(job.recoveries)} of {job.deaths}{f' (then {job.end})' if job.end else ''}" for job in jobs
    )


def _survivors_back(cluster: Cluster, scratch: Path, task: Task, deaths: int, seconds: float) -> tuple[Figure, str]:
    """Return when survivors are ready, and in words what a preparation of this many seconds adds."""
    prepared = raylaunch(cluster, scratch, replace(task, deaths=deaths, options=("--prepare", str(seconds))))
    figure = Figure(
        name="survivors back",
        what=f"The same for a script with {seconds:g} s of preparation, until the survivors are ready for the new step.",
        unit="s",
        samples={RAYLAUNCH: tuple(one["forked"] for one in prepared.recoveries)},
        goals=(figures.worst_at_most(0.5),),
    )
    added = ", ".join(f"{one['passed'] - seconds:.2f}" for one in prepared.recoveries)
    return (
        figure,
        f"with {seconds:g} s of preparation, all ranks had done a new step {added} s after the prepared rank could",
    )


_FROM = "From the SIGKILL of rank 1 until all ranks"
_WITH_STEP = {**SCRIPT_STATIONS, "passed": "... past its first optimizer step"}
_RESTARTS = (
    (
        Restart(
            name="restart",
            what=f"{_FROM} are past their first `all_reduce` of the next attempt.",
            script=SCRIPT,
            stations=SCRIPT_STATIONS,
            phases=timeline.WITHOUT_STEP,
            goals=(
                figures.median_at_most(0.15),
                figures.times_better(25),
                figures.worst_to_median(3),
                figures.times_better(100, RAY_TRAIN),
            ),
        ),
        Size(turns=(*(TORCHRUN, RAYLAUNCH) * 2, TORCHRUN_DEFAULTS, RAY_TRAIN), deaths=(20, 2)),
        (TORCHRUN, RAYLAUNCH),
    ),
    (
        Restart(
            name="restart-ddp",
            what=f"{_FROM} have done the first optimizer step of the next attempt.",
            script=DDP_SCRIPT,
            stations=_WITH_STEP,
            goals=(figures.times_better(20), figures.worst_to_median(3)),
        ),
        Size(turns=(TORCHRUN, RAYLAUNCH, TORCHRUN), deaths=(20, 2)),
        (RAYLAUNCH,),
    ),
    (
        Restart(
            name="restart-heavy",
            what=f"{_FROM} of a script with heavy imports are past their next first `all_reduce`.",
            script=HEAVY_SCRIPT,
            each=1.0,
            settings={"preload": "auto"},
            stations={**SCRIPT_STATIONS, "imported": "... past its imports"},
            phases={**timeline.WITHOUT_STEP, "imported": "imported: torch, pandas, scikit-learn"},
            goals=(figures.times_better(15), figures.worst_to_median(3)),
        ),
        Size(turns=(TORCHRUN, RAYLAUNCH), deaths=(10, 2), first=10.0),
        (RAYLAUNCH,),
    ),
    (
        Restart(
            name="restart-state",
            what=f"{_FROM} have done a new step, with a state of 100 MB in each rank.",
            script=STATE_SCRIPT,
            each=0.6,
            stations={**SCRIPT_STATIONS, "passed": "... past a new step"},
            goals=(figures.median_at_most(0.45), figures.times_better(15), figures.worst_to_median(3)),
        ),
        Size(turns=(TORCHRUN, RAYLAUNCH), deaths=(12, 2), first=6.0),
        (TORCHRUN, RAYLAUNCH),
    ),
    (
        Restart(
            name="restart-elastic",
            what=f"{_FROM} have done a new step, with 100 MB of `State` on each rank.",
            script=ELASTIC_SCRIPT,
            stations=_WITH_STEP,
            goals=(figures.median_at_most(0.35), figures.times_better(15), figures.worst_to_median(3)),
        ),
        Size(turns=(TORCHRUN, ALL_ANEW, RAYLAUNCH), deaths=(15, 2), prepared=(4, 5.0)),
        (RAYLAUNCH,),
    ),
)

BENCHES: dict[str, Bench[Size]] = {
    each.name: Bench(
        measure=each.measure,
        full=full,
        smoke=replace(
            full, turns=turns, deaths=(1, 1), first=0.4, agents=1, prepared=(1, 0.5) if full.prepared[0] else (0, 0.0)
        ),
    )
    for each, full, turns in _RESTARTS
}
