"""8 ranks print 100,000 lines each: how long until all have printed, and until the launcher has shown all and ended.

Unbuffered lines of 60 to 98 characters. Everything is shown and kept in files: `show: all` against `--tee 3 --log-dir`,
their stdout a file; once more with raylaunch's default, which shows rank 0; and without any launcher, each rank's
stdout a file. All ranks begin together. What was shown and kept is compared with that.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raylaunch.core.machine.events_and_actions import WorkersStarted
from tests.private_cluster import Cluster, end_marked
from tools.bench import chatter, cpu, figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, TORCHRUN, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch

PLAIN, SHOWS_ONE = "no launcher", "raylaunch, rank 0 shown"
_SCRIPT = Path(__file__).with_name("chatter.py")
_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    workers: int = 8
    lines: int = 100_000
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Of one of the launcher's processes: seconds on a CPU, and its peak of resident memory, MB."""

    cpu: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Seconds since the first rank began to print."""

    printed: float
    ranks: float
    """Seconds of CPU that the ranks took for it."""
    ended: float = 0.0
    damaged: int = 0
    """Lines that were not shown as they were printed."""
    loads: tuple[Load, ...] = ()
    """Of torchrun, or of the driver and the agent."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    expected = [
        b"".join(b"%s\n" % chatter.line(rank, number).encode() for number in range(size.lines))
        for rank in range(size.workers)
    ]
    found: dict[str, list[Printed]] = {PLAIN: [], TORCHRUN: [], RAYLAUNCH: [], SHOWS_ONE: []}
    for _ in range(size.rounds):
        found[PLAIN].append(_plain(scratch, size))
        found[TORCHRUN].append(_torchrun(scratch, expected))
        found[RAYLAUNCH].append(_raylaunch(cluster, scratch, expected, show="all"))
        found[SHOWS_ONE].append(_raylaunch(cluster, scratch, expected, show="0"))
    return Outcome(
        figures=_figures(found, size, sum(map(len, expected)) / 1e6),
        details=(_detail(found),),
        notes=(
            "logs: the files of all ranks hold what was printed, byte by byte, with both launchers",
            _nobody_reads(cluster, scratch, size),
        ),
    )


def _figures(found: Mapping[str, Sequence[Printed]], size: Size, megabytes: float) -> tuple[Figure, ...]:
    what = f"{size.workers} ranks print {size.lines:,} lines each, {megabytes:.0f} MB: from the first line until"
    plain = ", ".join(f"{one.printed:.2f}" for one in found[PLAIN])

    def samples(of: Callable[[Printed], float], *without: str) -> dict[str, tuple[float, ...]]:
        return {name: tuple(map(of, ones)) for name, ones in found.items() if name not in without}

    return (
        Figure(
            name="logs: printed",
            what=f"{what} the last is done; without any launcher: {plain} s.",
            unit="s",
            samples=samples(lambda one: one.printed),
            goals=(figures.ratio(1.1, PLAIN), figures.ratio(1.0)),
        ),
        Figure(
            name="logs: ranks' CPU",
            what="what the ranks take of the CPU to print all of it, together: what a launcher adds to each line.",
            unit="s",
            samples=samples(lambda one: one.ranks),
            goals=(figures.ratio(1.05, PLAIN),),
        ),
        Figure(
            name="logs: shown",
            what=f"{what} the launcher has shown all of it and ended.",
            unit="s",
            samples=samples(lambda one: one.ended, PLAIN),
            goals=(figures.ratio(1.0),),
        ),
        Figure(
            name="logs: damaged",
            what="lines that are not shown as they were printed, behind their header: cut, mixed or missing.",
            unit="lines",
            samples=samples(lambda one: float(one.damaged), PLAIN),
            goals=(figures.worst_at_most(0),),
        ),
    )


def _detail(found: Mapping[str, Sequence[Printed]]) -> Detail:
    rows = []
    for name, ones in found.items():
        last = ones[-1]
        loads = [f"{load.cpu:.2f} s, {load.memory:.0f} MB" for load in last.loads]
        ended = f"{last.ended:.2f}" if last.ended else "-"
        rows.append(
            (name, f"{last.printed:.2f}", ended, f"{last.ranks:.2f} s", *loads, *("-" for _ in range(2 - len(loads))))
        )
    return Detail(
        title="logs, the last round: seconds, and what was taken of the CPU and at most of memory:",
        columns=("", "printed", "ended", "ranks", "torchrun, or driver", "agent"),
        rows=tuple(rows),
    )


# The contenders.


def _plain(scratch: Path, size: Size) -> Printed:
    """Each rank leads a session of its own, as launchers have it: the kernel shares CPUs out among sessions."""
    folder = new_folder(scratch, "plain")
    mark = secrets.token_hex(8)
    running = []
    try:
        for rank in range(size.workers):
            env = processes.environment(mark, {"RANK": str(rank), "WORLD_SIZE": str(size.workers)})
            with (folder / f"{rank}.log").open("wb") as log:
                command = [sys.executable, "-u", str(_SCRIPT), str(folder), str(size.lines)]
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
        if any(process.wait(_SECONDS) for process in running):
            raise processes.BenchError((folder / "0.log").read_text()[-3000:])
    finally:
        end_marked(mark)
    return _of_ranks(folder)[1]


def _torchrun(scratch: Path, expected: list[bytes]) -> Printed:
    folder = new_folder(scratch, TORCHRUN)
    options = ("--tee=3", f"--log-dir={folder}/logs")
    command = launches.torchrun(_SCRIPT, *_args(folder, expected), workers=len(expected), options=options)
    with launches.started(command, folder) as launch:
        printed = _printed(launch, len(expected))
    damaged = _damaged(launch.out, b"[default%d]:", expected)
    for rank, text in enumerate(expected):
        _same(next(folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")), text)
    return replace(printed, damaged=damaged)


def _raylaunch(cluster: Cluster, scratch: Path, expected: list[bytes], *, show: str) -> Printed:
    folder = new_folder(scratch, RAYLAUNCH)
    command = launches.raylaunch(
        cluster, folder, _SCRIPT, *_args(folder, expected), workers=len(expected), preload=[], show=show
    )
    with launches.started(command, folder, extra=access(cluster)) as launch:
        printed = _printed(launch, len(expected))
    damaged = _damaged(launch.out, *((b"[%d] ", expected) if show == "all" else (b"", expected[:1])))
    for rank, text in enumerate(expected):
        _same(launch.run / "attempt-1" / f"rank-{rank}" / "stdout.log", text)
    return replace(printed, damaged=damaged)


def _args(folder: Path, expected: list[bytes]) -> tuple[str, str]:
    return str(folder), str(expected[0].count(b"\n"))


def _printed(launch: Launch, workers: int) -> Printed:
    """From before its ranks print until it has ended."""
    launch.wait_for(*(f"there-0-{rank}" for rank in range(workers)), seconds=_SECONDS)
    pids = (launch.process.pid, *launch.agents())
    before = after = [_load(pid) for pid in pids]
    while launch.process.poll() is None:
        after = [_load(pid) or last for pid, last in zip(pids, after, strict=True)]
        time.sleep(0.02)
    ended = time.monotonic()
    launch.wait(0)
    began, printed = _of_ranks(launch.folder)
    return replace(
        printed,
        ended=ended - began,
        loads=tuple(
            Load(then.cpu - since.cpu, then.memory) for then, since in zip(after, before, strict=True) if then and since
        ),
    )


def _of_ranks(folder: Path) -> tuple[float, Printed]:
    """When the first began, and what is known by the ranks."""
    marks = [[*map(float, path.read_text().split())] for path in folder.glob("printed-0-*")]
    first = min(began for began, _, _ in marks)
    return first, Printed(printed=max(done for _, done, _ in marks) - first, ranks=sum(used for _, _, used in marks))


def _load(pid: int) -> Load | None:
    """Up to now; None: it has ended."""
    with contextlib.suppress(OSError, KeyError):
        rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Load(cpu.seconds(pid), int(rows["VmHWM"].split()[0]) * 1024 / 1e6)
    return None


# Whether all is there.


def _same(path: Path, expected: bytes) -> None:
    if path.read_bytes() != expected:
        raise processes.BenchError(f"{path} is not what was printed: {path.stat().st_size} of {len(expected)} bytes")


def _damaged(path: Path, header: bytes, expected: list[bytes]) -> int:
    """How many lines are not shown as they were printed, each behind its rank's header: cut, mixed or missing."""
    shown = path.read_bytes().splitlines(keepends=True)
    whole = 0
    for rank, text in enumerate(expected):
        mine = header % rank if header else b""
        printed = {mine + line for line in text.splitlines(keepends=True)}
        whole += len(printed.intersection(shown))
    return sum(text.count(b"\n") for text in expected) - whole


# A reader that does not read.


def _nobody_reads(cluster: Cluster, scratch: Path, size: Size) -> str:
    """In words: nobody reads the driver's stdout while ranks print, one of them fails, and all start again."""
    folder = new_folder(scratch, RAYLAUNCH)
    args = (str(folder), str(size.lines), "DIES")
    command = launches.raylaunch(
        cluster, folder, _SCRIPT, *args, workers=size.workers, preload=[], show="all", max_restarts=1
    )
    with launches.started(command, folder, extra=access(cluster), stdout=subprocess.PIPE) as launch:
        launch.wait_for(*(f"printed-1-{rank}" for rank in range(size.workers)), seconds=_SECONDS)
        restart = _restart(launch)
        assert launch.process.stdout is not None
        with _drained(launch.process.stdout.fileno()):
            launch.wait(_SECONDS)
    printed = _of_ranks(folder)[1].printed
    return (
        f"logs: while nobody read raylaunch's stdout, {size.workers} ranks printed all in {printed:.2f} s, "
        f"one failed, and the next attempt was started {restart:.3f} s after the driver was told"
    )


def _restart(launch: Launch) -> float:
    log = launch.log()
    started = [(at, event.attempt) for at, event in log.events(WorkersStarted) if event.attempt > 1]
    if not started:
        raise launch.complaint("no restart")
    at, attempt = started[-1]
    return at - log.launched(attempt)


@contextlib.contextmanager
def _drained(pipe: int) -> Iterator[None]:
    """Somebody reads all of it at last."""
    reader = subprocess.Popen(["cat"], stdin=pipe, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        reader.kill()
        reader.wait()


BENCH = Bench(measure=measure, full=Size(), smoke=Size(workers=2, lines=1000, rounds=1))
