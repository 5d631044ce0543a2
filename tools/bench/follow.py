"""64 ranks print 1,000 lines per second each while three people follow them: does a step take longer?

Ranks, agent, driver and the three `raylaunch logs -f` share the machine. A step computes for a moment and prints 100
lines; each rank makes ten in a second. In one run, seconds in which nobody follows take turns with those in which three
do, so that both have the same processes and the same machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import subprocess
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.private_cluster import Cluster, end_marked
from tools.bench import cpu, figures, launches, printer, processes
from tools.bench.contenders import RAYLAUNCH, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch

FOLLOWERS = 3
ALONE = "nobody follows"
_SCRIPT = Path(__file__).with_name("printer.py")
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    workers: int = 64
    rounds: int = 3
    seconds: float = 8.0
    """Of each turn."""
    settle: float = 2.0
    """Seconds before each turn: commands start meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some seconds of the run, what its processes took of the CPU in them, and what those who followed had of it."""

    began: float
    ended: float
    driver: float
    agent: float
    followers: float = 0.0
    lines: int = 0
    """Of one who followed."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Take turns in one run."""
    folder = new_folder(scratch, RAYLAUNCH)
    command = launches.raylaunch(cluster, folder, _SCRIPT, str(folder), workers=size.workers, preload=[], show="0")
    extra = access(cluster) | {"XDG_STATE_HOME": str(folder), "PYTHONPATH": str(Path.cwd())}
    spans: dict[str, list[Span]] = {ALONE: [], RAYLAUNCH: []}
    with launches.started(command, folder, extra=extra) as launch:
        launch.wait_for(*(f"there-0-{rank}" for rank in range(size.workers)), seconds=_START_SECONDS)
        pids = (launch.process.pid, *launch.agents())
        for _ in range(size.rounds):
            spans[ALONE].append(_span(pids, (), size))
            with _followers(launch, extra) as following:
                spans[RAYLAUNCH].append(_span(pids, following, size))
        spans[ALONE].append(_span(pids, (), size))
        (folder / "end").touch()
        launch.wait(_START_SECONDS)
    return _outcome(spans, size, [array("d", path.read_bytes()) for path in folder.glob("steps-*")])


def _outcome(spans: dict[str, list[Span]], size: Size, ranks: Sequence[array[float]]) -> Outcome:
    if len(ranks) != size.workers:
        raise processes.BenchError(f"{len(ranks)} of {size.workers} ranks wrote down their steps")
    taken = {name: [_steps(ranks, span) for span in some] for name, some in spans.items()}
    medians = {name: tuple(1000 * statistics.median(steps) for steps in some) for name, some in taken.items()}
    slow = {
        name: tuple(1000 * statistics.quantiles(steps, n=100)[98] for steps in some) for name, some in taken.items()
    }
    rows = [
        (
            name,
            f"{statistics.median(len(steps) / span.seconds / size.workers for steps, span in zip(taken[name], some, strict=True)):.2f}",
            *(f"{statistics.median(of):.2f}" for of in _cpus(some)),
        )
        for name, some in spans.items()
    ]
    had = statistics.median(span.lines / span.seconds for span in spans[RAYLAUNCH])
    printed = size.workers * printer.LINES_PER_STEP * printer.STEPS_PER_SECOND
    return Outcome(
        figures=(
            Figure(
                name="follow: step",
                what=f"a step of {size.workers} ranks that print 1,000 lines per second each, while {FOLLOWERS} follow all.",
                unit="ms",
                samples=medians,
                goals=(figures.ratio(1.05, ALONE),),
            ),
            Figure(
                name="follow: slow step",
                what="the slowest of 100 steps of these.",
                unit="ms",
                samples=slow,
            ),
        ),
        details=(
            Detail(
                title="follow: steps per second and rank, and seconds of CPU per second:",
                columns=("", "steps", "driver", "agent", "followers"),
                rows=tuple(rows),
            ),
        ),
        notes=(f"follow: {printed:,} lines were printed in a second, of which each of the {FOLLOWERS} had {had:,.0f}",),
    )


def _cpus(spans: Sequence[Span]) -> Iterator[list[float]]:
    yield [span.driver / span.seconds for span in spans]
    yield [span.agent / span.seconds for span in spans]
    yield [span.followers / span.seconds for span in spans]


def _steps(ranks: Sequence[array[float]], span: Span) -> list[float]:
    """Return the seconds of each step that was begun in a span."""
    return [steps[at + 1] for steps in ranks for at in range(0, len(steps), 2) if span.began <= steps[at] < span.ended]


def _span(pids: Sequence[int], following: Sequence[Path | int], of: Size) -> Span:
    """Let some seconds pass. `following`: the processes that follow, and the file of one of them."""
    time.sleep(of.settle)
    people = [pid for pid in following if isinstance(pid, int)]
    files = [path for path in following if isinstance(path, Path)]
    size = sum(path.stat().st_size for path in files)
    began, before = time.monotonic(), [cpu.seconds(pid) for pid in (*pids, *people)]
    time.sleep(of.seconds)
    after = [cpu.seconds(pid) for pid in (*pids, *people)]
    ended = time.monotonic()
    used = [then - since for then, since in zip(after, before, strict=True)]
    lines = 0
    for path in files:
        with path.open("rb") as file:
            file.seek(size)
            lines += file.read().count(b"\n")
    driver, agents, others = used[0], used[1 : len(pids)], used[len(pids) :]
    return Span(began=began, ended=ended, driver=driver, agent=sum(agents), followers=sum(others), lines=lines)


@contextlib.contextmanager
def _followers(launch: Launch, extra: dict[str, str]) -> Iterator[list[Path | int]]:
    """Have three commands follow the run. Each writes what it shows to a file."""
    mark = secrets.token_hex(8)
    command = [*launches.COMMAND, "logs", "-f", "-n", "0", str(launch.run)]
    found: list[Path | int] = []
    running = []
    try:
        for number in range(FOLLOWERS):
            path = launch.folder / f"followed-{number}"
            with path.open("wb") as file:
                env = processes.environment(mark, extra)
                running.append(
                    subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.DEVNULL, cwd=launch.folder)
                )
            found.append(running[-1].pid)
            if number == 0:
                found.append(path)
        yield found
        if any(process.poll() is not None for process in running):
            raise processes.BenchError("one who followed has ended")
    finally:
        end_marked(mark)
        for process in running:
            process.wait()
        for number in range(FOLLOWERS):
            with contextlib.suppress(OSError):
                os.unlink(launch.folder / f"followed-{number}")


BENCH = Bench(measure=measure, full=Size(), smoke=Size(workers=2, rounds=1, seconds=1.0, settle=1.5))
