"""Commands of raylaunch and torchrun for scripts other than `unchanged.py`, on one node."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.host import parent
from tests.private_cluster import Cluster, end_marked, marked
from tools.bench import event_log, processes
from tools.bench.contenders import CLUSTER_CPUS
from tools.bench.event_log import EventLog
from tools.bench.processes import BenchError

COMMAND = (sys.executable, "-m", "raylaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command at work. What it prints is in two files of its folder, unless its stdout is a pipe."""

    folder: Path
    mark: str
    process: subprocess.Popen[bytes]

    @property
    def out(self) -> Path:
        """Its stdout."""
        return self.folder / "out.txt"

    @property
    def err(self) -> Path:
        """Its stderr."""
        return self.folder / "err.txt"

    @property
    def run(self) -> Path:
        """raylaunch's run folder."""
        return self.folder / "runs" / "bench" / "bench"

    def log(self) -> EventLog:
        """What raylaunch's driver saw and did, so far."""
        return event_log.read(self.run / "events.jsonl")

    def agents(self) -> list[int]:
        """Process ids of raylaunch's agents: Ray started them, and they the rest of what runs on their nodes."""
        own = marked(self.mark)
        return [pid for pid in sorted({parent(pid) for pid in own} - {*own}) if _is_agent(pid)]

    def wait(self, seconds: float, *, code: int | None = 0) -> None:
        """Until it has ended, with this exit code; None: any."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.complaint("it did not end") from None
        if code is not None and found != code:
            raise self.complaint(f"exit code {found}")

    def wait_for(self, *names: str, seconds: float) -> None:
        """Until its script has written these files."""
        paths = [self.folder / name for name in names]

        def come() -> bool:
            return all(path.exists() for path in paths)

        processes.wait_until(lambda: come() or self.process.poll() is not None, seconds=seconds, every=0.02)
        if not come():
            raise self.complaint(f"no {', '.join(path.name for path in paths if not path.exists())}")

    def complaint(self, what: str) -> BenchError:
        """That it did not do what it should, with the end of what it printed."""
        return BenchError(f"{self.folder.name}: {what}\n{self.err.read_text(errors='replace')[-3000:]}")


def raylaunch(cluster: Cluster, folder: Path, script: Path, *args: str, workers: int, **more: Any) -> list[str]:
    """The command, on a running cluster."""
    path = job(folder, script, *args, workers=workers, **more)
    return [*COMMAND, str(path), f"ray.address={cluster.address}"]


def job(folder: Path, script: Path, *args: str, workers: int, **more: Any) -> Path:
    """Its job file. `more`: further settings."""
    settings = {
        "name": "bench",
        "run_id": "bench",
        "entrypoint": {"script": str(script), "args": list(args)},
        "nnodes": 1,
        "nproc_per_node": workers,
        "cpus_per_worker": CLUSTER_CPUS / workers,
        "log_dir": str(folder / "runs"),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(settings | more))
    return path


def torchrun(script: Path, *args: str, workers: int, options: Sequence[str] = ()) -> list[str]:
    """The command; `--standalone` is what torchrun recommends for one node."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    return [*command, *options, str(script), *args]


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, *, extra: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[Launch]:
    """Start it in its folder. Whatever happens, nothing of it is left afterwards."""
    mark = secrets.token_hex(8)
    env = processes.environment(
        mark, {"TMPDIR": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(extra or {})}
    )
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield Launch(folder=folder, mark=mark, process=process)
    finally:
        end_marked(mark)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _is_agent(pid: int) -> bool:
    return processes.command_line(pid).startswith("ray::raylaunch: agent")
