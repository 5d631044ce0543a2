"""How each contender is told to run the script, and what the script's ranks wrote down."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.private_cluster import Cluster, end_marked, free_ports
from tools.bench import event_log, processes
from tools.bench.event_log import EventLog
from tools.bench.processes import BenchError

RAYLAUNCH = "raylaunch"
TORCHRUN = "torchrun"
"""With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts seldom succeed."""
TORCHRUN_DEFAULTS = "torchrun, defaults"
RAY_TRAIN = "Ray Train"
ALL_ANEW = "all started again"
"""raylaunch without `elastic`."""
CLUSTER_CPUS = 4
"""Logical CPUs of the Ray cluster; a job takes all of them, whatever its world size."""
SCRIPT = Path(__file__).with_name("unchanged.py")
DDP_SCRIPT = Path(__file__).with_name("unchanged_ddp.py")
ELASTIC_SCRIPT = Path(__file__).with_name("unchanged_elastic.py")
HEAVY_SCRIPT = Path(__file__).with_name("unchanged_heavy.py")
STATE_SCRIPT = Path(__file__).with_name("unchanged_state.py")
RAY_TRAIN_SCRIPT = Path(__file__).with_name("ray_train.py")
_LOG = "log.txt"
_END_SECONDS = 30.0

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be run: the script with this many deaths, on this many agents with this many workers each.

    It trains for `first` seconds before the first death, for `each` before each other one. `options` are further
    ones of the script.
    """

    agents: int
    workers: int
    deaths: int = 0
    stay: bool = False
    first: float = 0.4
    each: float = 0.4
    script: Path = SCRIPT
    """`unchanged.py`, or one of its variants."""
    options: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Ranks."""
        return self.agents * self.workers

    def command(self, folder: Path) -> list[str]:
        """The script and its arguments."""
        return [str(self.script), *self.arguments(folder)]

    def arguments(self, folder: Path) -> list[str]:
        """The script's arguments alone."""
        training = ("--first", str(self.first), "--each", str(self.each))
        return [str(folder), str(self.deaths), *training, *(["--stay"] if self.stay else []), *self.options]

    def training(self, generation: int) -> float:
        """Seconds before a death."""
        return self.each if generation else self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """When a rank came past what, CLOCK_MONOTONIC: its first line, imports, `init_process_group`, `all_reduce`.

    `passed`: what the script is to pass, its first optimizer step where it has an optimizer.
    """

    entered: float
    imported: float
    joined: float
    reduced: float
    passed: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A contender at work. `began`: when its command was started, CLOCK_MONOTONIC."""

    task: Task
    folder: Path
    mark: str
    began: float
    commands: tuple[subprocess.Popen[bytes], ...]

    def marks(self, generation: int) -> list[Marks]:
        """Of the ranks that have passed in a generation."""
        return [Marks(**json.loads(path.read_text())) for path in self.folder.glob(f"passed-{generation}-*.json")]

    def times(self, generation: int, *, since: float) -> dict[str, float]:
        """Seconds until the last rank came past each of its stations in a generation that all have passed."""
        marks = self.marks(generation)
        names = ("entered", "imported", "joined", "reduced", "passed")
        return {name: max(getattr(mark, name) for mark in marks) - since for name in names}

    def death(self, generation: int) -> float | None:
        """When rank 1 killed itself, CLOCK_MONOTONIC."""
        path = self.folder / f"death-{generation}"
        return float(path.read_text()) if path.exists() else None

    def has_passed(self, generation: int) -> bool:
        """Whether all ranks have, in a generation."""
        return len(list(self.folder.glob(f"passed-{generation}-*.json"))) == self.task.world

    def has_ended(self) -> bool:
        """Whether all of its commands have."""
        return all(command.poll() is not None for command in self.commands)

    def wait_for(self, generation: int, seconds: float) -> bool:
        """Wait until all ranks have passed; False: it ended before that, or time is up."""
        processes.wait_until(lambda: self.has_passed(generation) or self.has_ended(), seconds=seconds)
        return self.has_passed(generation)

    def wait_for_end(self, seconds: float = _END_SECONDS) -> list[int | None]:
        """The exit codes; None for a command that is still at work."""
        processes.wait_until(self.has_ended, seconds=seconds)
        return [command.poll() for command in self.commands]

    def complaint(self, what: str) -> BenchError:
        """That it did not do what it should, with the end of what it printed."""
        codes = [command.poll() for command in self.commands]
        log = (self.folder / _LOG).read_text(errors="replace")[-3000:]
        return BenchError(f"{self.folder.name}: {what} (exit codes {codes})\n{log}")


def raylaunch(
    cluster: Cluster, scratch: Path, task: Task, settings: Mapping[str, object] | None = None
) -> contextlib.AbstractContextManager[Started]:
    """`python -m raylaunch job.yaml` on the running cluster, all agents on its one node, with more settings if given."""
    overrides = (f"ray.address={cluster.address}", "placement=pack")
    return _raylaunch(scratch, task, settings or {}, overrides, access(cluster))


def raylaunch_alone(
    scratch: Path, task: Task, *, address: str = "none", settings: Mapping[str, object] | None = None
) -> contextlib.AbstractContextManager[Started]:
    """`python -m raylaunch job.yaml` on this machine alone, with more settings if given."""
    return _raylaunch(scratch, task, settings or {}, (f"ray.address={address}",), {})


def _raylaunch(
    scratch: Path, task: Task, settings: Mapping[str, object], overrides: Sequence[str], extra: Mapping[str, str]
) -> contextlib.AbstractContextManager[Started]:
    folder = new_folder(scratch, RAYLAUNCH)
    script, *args = task.command(folder)
    job = {
        "name": "bench",
        "run_id": "bench",
        "entrypoint": {"script": script, "args": args},
        "nnodes": task.agents,
        "nproc_per_node": task.workers,
        "cpus_per_worker": CLUSTER_CPUS / task.world,
        "max_restarts": task.deaths + 5,
        "show": "none",
        "log_dir": str(folder / "runs"),
        **settings,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return _started(folder, task, [[sys.executable, "-m", "raylaunch", "job.yaml", *overrides]], extra)


def access(cluster: Cluster) -> dict[str, str]:
    """Variables with which the cluster lets a driver in."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}


def log_of(started: Started) -> EventLog:
    """What raylaunch's driver saw and did; nothing, if another has started it."""
    return event_log.read(started.folder / "runs" / "bench" / "bench" / "events.jsonl")


def ray_train(cluster: Cluster, scratch: Path, task: Task) -> contextlib.AbstractContextManager[Started]:
    """`ray_train.py` on the running cluster: workers that do what the task's script does."""
    folder = new_folder(scratch, "ray-train")
    command = [sys.executable, str(RAY_TRAIN_SCRIPT), *task.arguments(folder)]
    extra = {"RAY_ADDRESS": cluster.address, "BENCH_MODULE": task.script.stem, "BENCH_WORLD": str(task.world)}
    return _started(folder, task, [command], access(cluster) | extra)


def torchrun(scratch: Path, task: Task, *, share_store: bool = False) -> contextlib.AbstractContextManager[Started]:
    """One `torchrun` for each agent, with the settings under which it does best.

    With `share_store`, which is its default, workers of a restart find the store as the dead ones left it.
    """
    folder = new_folder(scratch, TORCHRUN)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    commands = [_torchrun(task, folder, endpoint, is_host=agent == 0) for agent in range(task.agents)]
    extra = {} if share_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return _started(folder, task, commands, extra)


def torchrun_standalone(scratch: Path, task: Task) -> contextlib.AbstractContextManager[Started]:
    """`torchrun --standalone`, as one starts it on one machine."""
    folder = new_folder(scratch, TORCHRUN)
    words = ("--standalone", f"--nproc-per-node={task.workers}", f"--max-restarts={task.deaths + 5}")
    return _started(folder, task, [[sys.executable, "-m", "torch.distributed.run", *words, *task.command(folder)]], {})


def _torchrun(task: Task, folder: Path, endpoint: str, *, is_host: bool) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={task.agents}", f"--nproc-per-node={task.workers}", f"--max-restarts={task.deaths + 5}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", "--local-addr=127.0.0.1"),
        f"--rdzv-conf=is_host={int(is_host)}",
        *task.command(folder),
    ]


def new_folder(scratch: Path, name: str) -> Path:
    """Of a contender, for one run."""
    folder = scratch / f"{name}-{next(_numbers)}"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def _started(folder: Path, task: Task, commands: list[list[str]], extra: Mapping[str, str]) -> Iterator[Started]:
    """Start the commands; whatever happens, nothing of them is left afterwards."""
    mark = secrets.token_hex(8)
    log = folder / _LOG
    with tmpfs() as variables:
        extra = {"TMPDIR": str(folder), **variables, **extra}
        began = time.monotonic()
        try:
            running = tuple(processes.start(command, mark, extra, folder, log) for command in commands)
            yield Started(task=task, folder=folder, mark=mark, began=began, commands=running)
        finally:
            end_marked(mark)


@contextlib.contextmanager
def tmpfs() -> Iterator[dict[str, str]]:
    """Variables that name a folder of one run in tmpfs, where scripts save what has no `State`; see `saved.py`."""
    with tempfile.TemporaryDirectory(prefix="rlb-", dir="/dev/shm") as folder:
        yield {"BENCH_TMPFS": folder}
