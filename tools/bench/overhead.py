"""The time of a training step, from its beginning to its end, under raylaunch and under torchrun.

Three jobs with two ranks each, one thread a rank, are up at the same time: raylaunch's, torchrun's, and torchrun's once
more, which says how much of a difference is none. They take turns of about two seconds, in an order drawn by lot: in a
turn of one, every process of the others is stopped, launchers and workers. Only whole steps within a turn count. The
Ray cluster runs on in all turns.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.private_cluster import Cluster, marked
from tools.bench import cpu, figures, launches
from tools.bench.contenders import RAYLAUNCH, TORCHRUN, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch

WORKERS = 2
AGAIN = "torchrun again"
_SETTLE_SECONDS = 0.3
"""Of each turn: what was stopped catches up."""
_START_SECONDS = 90.0
_DRAWS = 1000
_SCRIPT = Path(__file__).with_name("trainer.py")
_KINDS = {0: "steps of ~10 ms", 1: "steps of ~50 ms"}
_SEED = 5

Step = tuple[int, int, int]
"""Kind, beginning, end (ns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    rounds: int = 9
    turn: float = 1.9
    """Seconds."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One of those that take turns. `launcher` is by the part that its processes play."""

    launch: Launch
    workers: list[int]
    launcher: dict[str, list[int]]
    turns: list[tuple[int, int]] = field(default_factory=list)
    """From when to when, ns."""
    used: dict[str, cpu.Use] = field(default_factory=dict)
    """By each part of the launcher, in all of its turns."""
    ray: cpu.Use = field(default_factory=cpu.Use)
    """By the processes of the Ray cluster meanwhile."""
    steps: list[Step] = field(default_factory=list)

    def pids(self) -> list[int]:
        """All of it."""
        return [*(pid for pids in self.launcher.values() for pid in pids), *self.workers]

    def of_turns(self, kind: int) -> list[list[float]]:
        """Milliseconds of the steps of each turn that had some."""
        steps = [(began, (end - began) / 1e6, end) for which, began, end in self.steps if which == kind]
        turns = [[took for began, took, end in steps if since <= began and end <= until] for since, until in self.turns]
        return [turn for turn in turns if turn]


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    with contextlib.ExitStack() as stack:
        running = {
            RAYLAUNCH: stack.enter_context(_raylaunch(cluster, scratch)),
            TORCHRUN: stack.enter_context(_torchrun(scratch)),
            AGAIN: stack.enter_context(_torchrun(scratch)),
        }
        jobs = {name: _job(launch) for name, launch in running.items()}
        ray = [pid for pid in marked(cluster.mark) if pid not in jobs[RAYLAUNCH].pids()]
        _take_turns(jobs, ray, size)
        for job in jobs.values():
            job.steps = _steps(job)
            if not all(job.of_turns(kind) for kind in _KINDS):
                raise job.launch.complaint("no step was done in its turns: the machine is too busy")
    return Outcome(
        figures=tuple(_figure(jobs, kind) for kind in _KINDS),
        details=(_ratios(jobs), _launchers(jobs)),
        more={"turns": {name: {_KINDS[kind]: job.of_turns(kind) for kind in _KINDS} for name, job in jobs.items()}},
    )


def _figure(jobs: Mapping[str, Job], kind: int) -> Figure:
    (low, high) = _interval(jobs[RAYLAUNCH].of_turns(kind), jobs[TORCHRUN].of_turns(kind), statistics.median)
    return Figure(
        name=f"overhead: {_KINDS[kind]}",
        what=(
            "from a step's beginning to its end, the median of each turn; 95 % interval of the ratio of the medians of "
            f"all steps: {low:.4f} to {high:.4f}."
        ),
        unit="ms",
        samples={name: tuple(map(statistics.median, job.of_turns(kind))) for name, job in jobs.items()},
        goals=(figures.ratio(1.01),),
    )


# The jobs.


def _raylaunch(cluster: Cluster, scratch: Path) -> contextlib.AbstractContextManager[Launch]:
    folder = new_folder(scratch, RAYLAUNCH)
    command = launches.raylaunch(cluster, folder, _SCRIPT, str(folder), workers=WORKERS, node_timeout=60)
    return launches.started(command, folder, extra=access(cluster))


def _torchrun(scratch: Path) -> contextlib.AbstractContextManager[Launch]:
    folder = new_folder(scratch, TORCHRUN)
    return launches.started(launches.torchrun(_SCRIPT, str(folder), workers=WORKERS), folder)


def _job(launch: Launch) -> Job:
    launch.wait_for(*(f"there-{rank}" for rank in range(WORKERS)), seconds=_START_SECONDS)
    workers = [int((launch.folder / f"there-{rank}").read_text()) for rank in range(WORKERS)]
    others = [pid for pid in marked(launch.mark) if pid not in (*workers, launch.process.pid)]
    launcher = {TORCHRUN: [launch.process.pid, *others]}
    if agents := launch.agents():
        rest = "fork server, its subreaper, stores"
        launcher = {"driver": [launch.process.pid], "agent": agents, rest: others}
    return Job(launch=launch, workers=workers, launcher=launcher)


def _take_turns(jobs: Mapping[str, Job], ray: Sequence[int], size: Size) -> None:
    lot = random.Random(_SEED)
    for job in jobs.values():
        _send(job, signal.SIGSTOP)
    before = {name: _used(job) for name, job in jobs.items()}
    for _ in range(size.rounds):
        for name in lot.sample([*jobs], len(jobs)):
            of_ray = cpu.use(ray)
            _take_turn(jobs[name], size.turn)
            jobs[name].ray += cpu.use(ray) - of_ray
    for name, job in jobs.items():
        job.used = {part: use - before[name][part] for part, use in _used(job).items()}
        (job.launch.folder / "leave").touch()
        _send(job, signal.SIGCONT)


def _take_turn(job: Job, seconds: float) -> None:
    _send(job, signal.SIGCONT)
    time.sleep(_SETTLE_SECONDS)
    since = time.monotonic_ns()
    time.sleep(seconds - _SETTLE_SECONDS)
    job.turns.append((since, time.monotonic_ns()))
    _send(job, signal.SIGSTOP)


def _used(job: Job) -> dict[str, cpu.Use]:
    return {part: cpu.use(pids) for part, pids in job.launcher.items()}


def _send(job: Job, number: signal.Signals) -> None:
    for pid in job.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _steps(job: Job) -> list[Step]:
    job.launch.wait(_START_SECONDS)
    found: list[Step] = []
    for rank in range(WORKERS):
        numbers = array("q", (job.launch.folder / f"steps-{rank}").read_bytes())
        found += zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return found


# What they say.

Turns = Sequence[Sequence[float]]


def _interval(ours: Turns, theirs: Turns, middle: Callable[[list[float]], float]) -> tuple[float, float]:
    """Where the ratio lies, by drawing whole turns again and again: steps of one turn share its fortune."""
    lot = random.Random(_SEED)

    def drawn(turns: Turns) -> float:
        return middle([step for turn in lot.choices(turns, k=len(turns)) for step in turn])

    ratios = sorted(drawn(ours) / drawn(theirs) for _ in range(_DRAWS))
    return ratios[round(0.025 * _DRAWS)], ratios[round(0.975 * _DRAWS) - 1]


def _ratios(jobs: Mapping[str, Job]) -> Detail:
    rows = []
    for kind, name in _KINDS.items():
        turns = {contender: job.of_turns(kind) for contender, job in jobs.items()}
        for word, middle in (("median", statistics.median), ("mean", statistics.fmean)):
            whole = {contender: middle([step for turn in found for step in turn]) for contender, found in turns.items()}
            cells = [f"{whole[contender]:.3f}" for contender in jobs]
            for contender in (RAYLAUNCH, AGAIN):
                low, high = _interval(turns[contender], turns[TORCHRUN], middle)
                cells.append(f"{whole[contender] / whole[TORCHRUN]:.4f} ({low:.4f} to {high:.4f})")
            rows.append((f"{name}, {word} of all", *cells))
    return Detail(
        title="overhead, ms, and ratios to torchrun with their 95 % intervals (whole turns drawn again):",
        columns=("", *jobs, f"{RAYLAUNCH} / {TORCHRUN}", f"{AGAIN} / {TORCHRUN}"),
        rows=tuple(rows),
    )


def _launchers(jobs: Mapping[str, Job]) -> Detail:
    """What is taken from the training. Ray's threads in its drivers and actors are there whatever they do."""
    rows = []
    for name in (RAYLAUNCH, TORCHRUN):
        job = jobs[name]
        parts = {**job.used, "all together": sum(job.used.values(), start=cpu.Use())}
        rows += [(f"{name}: {part}", *_rates(use, job)) for part, use in parts.items()]
        rows.append((f"the Ray cluster's own processes in {name}'s turns", *_rates(job.ray, job)))
    return Detail(
        title="overhead, what is no worker, per second of training:",
        columns=("", "ms of CPU", "of it in threads of Ray's libraries", "wake-ups"),
        rows=tuple(rows),
    )


def _rates(use: cpu.Use, job: Job) -> tuple[str, ...]:
    training = sum(until - since for since, until in job.turns) / 1e9 + _SETTLE_SECONDS * len(job.turns)
    return f"{1000 * use.seconds / training:.2f}", f"{1000 * use.of_ray / training:.2f}", f"{use.wakes / training:.1f}"


BENCH = Bench(measure=measure, full=Size(), smoke=Size(rounds=1, turn=12.0))
