"""A planned change: from the last step of the ranks before it until all ranks have made a step after it.

2 workers on each node, a DDP model and Adam, 100 MB of `State` on each rank, gloo; both nodes are on this machine, without Ray. A person
requests one node (`raylaunch resize 1`), so that a node leaves after what it holds was copied, and then two, so that a
node joins; this 4 times in one job, with `elastic` and without. What the script does before it trains, from the fork of
the workers that are new until the last of them calls its function, is the script's own, and is reported apart.

torchrun takes in a second agent, and loses it again by SIGTERM; rank 0 writes the same 100 MB to /dev/shm each 20 steps.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raylaunch.core.machine.events_and_actions import WorkersStarted
from tests.private_cluster import Cluster, end_marked, free_ports
from tools.bench import figures, launches, processes
from tools.bench.contenders import ALL_ANEW, RAYLAUNCH, TORCHRUN, new_folder, tmpfs
from tools.bench.figures import Bench, Detail, Figure, Outcome, Times

WORKERS = 2
_SCRIPT = Path(__file__).with_name("resized.py")
_SECONDS = 120.0
_STATIONS = {
    "launched": "the driver orders the next attempt",
    "started": "all workers are forked, or have stayed",
    "set-up": "the last new worker calls its function",
    "entered": "all are in their function",
    "restored": "... have restored",
    "step": "... have made a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    rounds: int = 4
    warm_steps: int = 120
    """So many that each rank has written both of its buffers: the first use of memory takes longer than all of a change."""
    contenders: tuple[str, ...] = (RAYLAUNCH, ALL_ANEW, TORCHRUN)


@dataclass(frozen=True, slots=True)
class _Note:
    attempt: int
    rank: int
    world: int
    what: str
    at: float


@dataclass(frozen=True, slots=True)
class _Notes:
    """What the ranks have noted, of all attempts."""

    folder: Path
    warm_steps: int

    def all(self) -> list[_Note]:
        rows = [
            line.split()
            for path in self.folder.glob("note.*")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [_Note(int(row[0]), int(row[1]), int(row[2]), row[3], float(row[4])) for row in rows]

    def trains(self, attempt: int, world: int) -> bool:
        """Whether all ranks have done some steps in an attempt of this size."""
        found = [note for note in self.all() if (note.attempt, note.world) == (attempt, world)]
        steps = [sum(note.rank == rank and note.what.isdecimal() for note in found) for rank in range(world)]
        return min(steps) >= self.warm_steps

    def times(self, before: int, after: int) -> dict[str, float]:
        """When the last rank came to each of its stations after a change. `stopped`: its last step before."""
        notes = self.all()
        found = {"stopped": max(note.at for note in notes if note.attempt == before and note.what.isdecimal())}
        later = [note for note in notes if note.attempt == after]
        found |= {what: max(note.at for note in later if note.what == what) for what in ("entered", "restored")}
        first: dict[int, float] = {}
        for note in later:
            if note.what.isdecimal():
                first[note.rank] = min(note.at, first.get(note.rank, note.at))
        return found | {"step": max(first.values())}

    def entered(self, attempt: int, ranks: Sequence[int]) -> float:
        """When the last of these ranks entered its function; 0.0 if there are none."""
        notes = [note for note in self.all() if (note.attempt, note.what) == (attempt, "entered")]
        return max((note.at for note in notes if note.rank in ranks), default=0.0)


def measure(_: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    ours = [name for name in size.contenders if name != TORCHRUN]
    found = {name: _raylaunch(scratch, size, elastic=name == RAYLAUNCH) for name in ours}
    theirs = _torchrun(scratch, size) if TORCHRUN in size.contenders else ("not tried", "not tried")
    parts: list[Figure] = []
    details: list[Detail] = []
    for index, what in enumerate(("a node leaves", "a node joins")):
        times = {name: changes[index] for name, changes in found.items()}
        samples: dict[str, figures.Samples] = {name: tuple(one["step"] for one in seen) for name, seen in times.items()}
        name = f"planned: {what}"
        whole = f"{what}: from the last step before it until all ranks have made one after it"
        parts.append(Figure(name=name, what=whole, unit="s", samples=samples | {TORCHRUN: theirs[index]}))
        own = {name: tuple(one["step"] - one["own"] for one in seen) for name, seen in times.items()}
        net = f"{name}, without the script's own set-up"
        apart = "the same without what new workers do before they call their function"
        parts.append(Figure(name=net, what=apart, unit="s", samples=own, goals=(figures.median_at_most(0.5),)))
        details.append(figures.stations(f"{name}, seconds after the last step", _STATIONS, times))
    return Outcome(figures=tuple(parts), details=tuple(details), more={"changes": found})


def _raylaunch(scratch: Path, size: Size, *, elastic: bool) -> tuple[list[Times], list[Times]]:
    """Return the times of all leaves and of all joins."""
    folder = new_folder(scratch, RAYLAUNCH)
    words = [str(folder), *([] if elastic else ["--anew"])]
    settings = {"nnodes": "1:2", "placement": "pack", "cpus_per_worker": 0.5, "show": "none"}
    job = launches.job(folder, _SCRIPT, *words, workers=WORKERS, **settings)
    command = [*launches.COMMAND, str(job), "ray.address=none"]
    extra = {"XDG_STATE_HOME": str(folder / "state")}
    notes = _Notes(folder, size.warm_steps)
    changes: tuple[list[Times], list[Times]] = ([], [])
    with launches.started(command, folder, extra=extra) as run:
        attempt = 1
        _wait(run, notes, attempt, 2 * WORKERS)
        for _ in range(size.rounds):
            for index, nodes in enumerate((1, 2)):
                _resize(folder, run.mark, extra, nodes)
                _wait(run, notes, attempt + 1, nodes * WORKERS)
                changes[index].append(_times(run, notes, attempt, nodes, elastic=elastic))
                attempt += 1
        (folder / "enough").touch()
        run.wait(_SECONDS)
    return changes


def _wait(run: launches.Launch, notes: _Notes, attempt: int, world: int) -> None:
    def come() -> bool:
        return notes.trains(attempt, world)

    processes.wait_until(lambda: come() or run.process.poll() is not None, seconds=_SECONDS)
    if not come():
        raise run.complaint(f"attempt {attempt} with {world} workers did not train")


def _resize(folder: Path, mark: str, extra: dict[str, str], nodes: int) -> None:
    command = [*launches.COMMAND, "resize", f"1:{nodes}", "bench/bench"]
    env = processes.environment(mark, {"TMPDIR": str(folder), **extra})
    subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)


def _times(run: launches.Launch, notes: _Notes, attempt: int, nodes: int, *, elastic: bool) -> Times:
    """Seconds from the last step before the change. `own`: what the script's set-up took."""
    log = run.log()
    forked = max(at for at, event in log.events(WorkersStarted) if event.attempt == attempt + 1)
    new = range(WORKERS if elastic else 0, nodes * WORKERS)
    found = notes.times(attempt, attempt + 1) | {"launched": log.launched(attempt + 1), "started": forked}
    found["set-up"] = notes.entered(attempt + 1, new) or forked
    stopped = found.pop("stopped")
    return {name: at - stopped for name, at in found.items()} | {"own": max(0.0, found["set-up"] - forked)}


# torchrun.


def _torchrun(scratch: Path, size: Size) -> tuple[figures.Samples, figures.Samples]:
    """Return the seconds of a leave and of a join."""
    with tmpfs() as variables:
        return _changes_of_torchrun(scratch, size, variables)


def _changes_of_torchrun(
    scratch: Path, size: Size, variables: dict[str, str]
) -> tuple[figures.Samples, figures.Samples]:
    folder = new_folder(scratch, TORCHRUN)
    endpoint, mark, notes = f"127.0.0.1:{free_ports(1)[0]}", secrets.token_hex(8), _Notes(folder, size.warm_steps)

    def agent(number: int) -> subprocess.Popen[bytes]:
        conf = f"is_host={int(number == 0)},last_call_timeout=1"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={WORKERS}"),
            *("--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"),
            *("--local-addr=127.0.0.1", f"--rdzv-conf={conf}", str(_SCRIPT), str(folder)),
        ]
        extra = {"TMPDIR": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
        return processes.start(command, mark, extra, folder, folder / f"log-{number}.txt")

    try:
        agent(0)
        if not processes.wait_until(lambda: notes.trains(WORKERS, WORKERS), seconds=_SECONDS):
            return "did not start", "did not start"
        second = agent(1)
        if not processes.wait_until(lambda: notes.trains(2 * WORKERS, 2 * WORKERS), seconds=_SECONDS):
            return "not tried", f"hung for {_SECONDS:.0f} s"
        joined = notes.times(WORKERS, 2 * WORKERS)
        for path in folder.glob(f"note.{WORKERS}.*"):
            path.unlink()
        second.send_signal(signal.SIGTERM)
        if not processes.wait_until(lambda: notes.trains(WORKERS, WORKERS), seconds=_SECONDS):
            return f"hung for {_SECONDS:.0f} s", (joined["step"] - joined["stopped"],)
        left = notes.times(2 * WORKERS, WORKERS)
        return (left["step"] - left["stopped"],), (joined["step"] - joined["stopped"],)
    finally:
        end_marked(mark)


BENCH = Bench(
    measure=measure,
    full=Size(),
    smoke=Size(rounds=1, warm_steps=10, contenders=(RAYLAUNCH, TORCHRUN)),
    needs_cluster=False,
)
