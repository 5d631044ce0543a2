"""Goodput with a random rank killed each 15 s for 3 minutes: the part of the time in which steps were done that count.

2 x 2 ranks with DDP, gloo, steps of 50 ms, a state of 50 MB in each rank; see `unchanged_goodput.py`. Goodput is the
number of different steps that were done, times the mean time of a step, by the time from the end of the first step on.
The first step after a restart is not part of the mean, since some of its time is the restart's. So commits,
checkpoints, restarts, and steps that are done again all count against goodput. That is what raylaunch reports as
`goodput` of a run, without the time before its first step, and with what commits take.

The time of a step is told for each contender: one that made the steps themselves longer would not gain by that.

raylaunch has `State` with `every="auto"` and `elastic`; torchrun (with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) and Ray Train have
checkpoints in tmpfs after each 20 steps.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from raylaunch.core.machine.events_and_actions import WorkersStarted
from tests.private_cluster import Cluster
from tools.bench import contenders, figures, processes
from tools.bench.contenders import RAY_TRAIN, RAYLAUNCH, TORCHRUN, Started, Task
from tools.bench.figures import Bench, Figure, Outcome

SCRIPT = Path(__file__).with_name("unchanged_goodput.py")
_START_SECONDS = 120.0
_REST = 0.02
"""Seconds: between two steps of an attempt there are less, and between two attempts there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    seconds: float = 180.0
    each: float = 15.0
    """Seconds from one kill to the next."""
    agents: int = 2


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One step of rank 0. Times are CLOCK_MONOTONIC, in seconds."""

    ended: float
    number: int
    began: float
    saved: float
    """When the commit or the checkpoint after it was made."""

    @property
    def seconds(self) -> float:
        """What the step itself took."""
        return self.ended - self.began


def steps_of(folder: Path) -> list[Step]:
    """Return all steps that were noted, in order of time. A line that a kill cut off is none."""
    found = []
    for file in folder.glob("*.steps"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                number, *times = line.split()
                began, ended, saved = map(float, times)
                found.append(Step(ended, int(number), began, saved))
    return sorted(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What became of a job. `again`: steps that were done more than once, counted each further time."""

    goodput: float
    useful: int
    again: int
    step_seconds: float
    """The mean time of a step."""
    median_seconds: float


def goodput(steps: Iterable[Step], seconds: float) -> Goodput:
    """Return the goodput of this many seconds from the end of the first step on."""
    steps = sorted(steps)
    counted = [step for step in steps[1:] if step.ended <= steps[0].ended + seconds]
    different = {step.number for step in counted} - {steps[0].number}
    pairs = pairwise([*steps[:1], *counted])
    ordinary = [step.seconds for before, step in pairs if step.began - before.saved < _REST]
    mean = statistics.mean(ordinary) if ordinary else 0.0
    return Goodput(
        goodput=len(different) * mean / seconds,
        useful=len(different),
        again=len(counted) - len(different),
        step_seconds=mean,
        median_seconds=statistics.median(ordinary) if ordinary else 0.0,
    )


def _killed(started: Started, seconds: float, each: float) -> tuple[Goodput, int]:
    """Kill a random rank again and again; return what became of the job, and the number of kills."""
    chosen = random.Random(1)
    if not processes.wait_until(
        lambda: bool(steps_of(started.folder)) or started.has_ended(), seconds=_START_SECONDS
    ) or not steps_of(started.folder):
        raise started.complaint("it did not start")
    began = steps_of(started.folder)[0].ended
    kills = 0
    for number in range(1, int(seconds / each)):
        time.sleep(max(0.0, began + number * each - time.monotonic()))
        alive = [pid for pid in _pids(started.folder) if processes.command_line(pid)]
        if alive:
            kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen.choice(alive), signal.SIGKILL)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return goodput(steps_of(started.folder), seconds), kills


def _stayed(started: Started) -> int:
    """Return how many times a worker stayed when another one was killed."""
    return sum(event.stayed for _, event in contenders.log_of(started).events(WorkersStarted))


def _pids(folder: Path) -> Iterator[int]:
    return (int(path.read_text()) for path in sorted(folder.glob("pid-*")))


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    seconds, each = size.seconds, size.each
    task = Task(agents=size.agents, workers=2, deaths=int(seconds / each), script=SCRIPT)
    runs: dict[str, Callable[[], AbstractContextManager[Started]]] = {
        RAYLAUNCH: lambda: contenders.raylaunch(cluster, scratch, task),
        TORCHRUN: lambda: contenders.torchrun(scratch, task),
        RAY_TRAIN: lambda: contenders.ray_train(cluster, scratch, task),
    }
    found: dict[str, Goodput] = {}
    notes = []
    for name, run in runs.items():
        with run() as started:
            one, kills = _killed(started, seconds, each)
            if name == RAYLAUNCH and kills and not _stayed(started):
                raise started.complaint("no worker stayed")
        found[name] = one
        notes.append(
            f"{name}: {kills} ranks killed in {seconds:g} s; {one.useful} steps of {1000 * one.step_seconds:.1f} ms "
            f"(median {1000 * one.median_seconds:.1f} ms) count, {one.again} were done again"
        )
    figure = Figure(
        name="goodput",
        what=figures.first_line(__doc__),
        unit="of the time",
        samples={name: (one.goodput,) for name, one in found.items()},
        goals=(figures.median_at_least(0.97),),
        more_is_better=True,
    )
    return Outcome(figures=(figure,), notes=tuple(notes))


BENCH = Bench(measure=measure, full=Size(), smoke=Size(seconds=2.0, each=1.0, agents=1))
