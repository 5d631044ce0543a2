"""Runs of raylaunch that use the GPU, and who holds it.

Where a GPU is simulated, scripts run on the CPU with gloo, and a process that would have a CUDA context holds a file
open instead.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.private_cluster import MARK, marked
from tools.gpu import steps

SCRIPTS = Path(__file__).parent / "scripts"
DEVICE = "/dev/nvidia-uvm"
"""Open in each process that has initialized CUDA. `nvidia-smi` holds others of /dev, but not this."""
SECONDS = 100.0
"""For one run. On a cold machine, torch and Ray take half a minute."""


def simulated() -> str:
    """Return the file that stands for the GPU's device; "" if there is a GPU."""
    return os.environ.get(steps.SIMULATED, "")


@functools.cache
def count() -> int:
    """Return the number of GPUs, without a CUDA context in this process."""
    if known := os.environ.get(steps.GPUS):
        return int(known)
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # to ask torch takes 2.5 s
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    return int(done.stdout.strip() or 0)


def why_not() -> str:
    """Return why tests that need a GPU cannot run here; "" if they can."""
    return "" if count() else "this machine has no CUDA device"


def holders(mark: str | None = None) -> list[int]:
    """Return the processes that hold a GPU, all of them or those whose environment has the mark."""
    device = simulated() or DEVICE
    pids = marked(mark) if mark is not None else [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if _holds(pid, device)]


def _holds(pid: int, device: str) -> bool:
    try:
        return any(os.readlink(fd) == device for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # it has ended


def command_line(pid: int) -> str:
    """Return the command line or the title of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def smi() -> list[tuple[int, str]]:
    """Return the process ids and the memory that `nvidia-smi` lists. In a container it may list none, or others."""
    if simulated():
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [(int(row[0]), row[1].strip()) for row in rows]


def environment() -> dict[str, str]:
    """Return the environment of a run without a cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@dataclass
class Run:
    """A `raylaunch` process, and what its script wrote down."""

    process: subprocess.Popen[bytes]
    folder: Path
    mark: str

    @property
    def out(self) -> str:
        """Its stdout."""
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its stderr."""
        return (self.folder / "err").read_text(errors="replace")

    def wait(self, code: int = 0, seconds: float = SECONDS) -> Run:
        """Wait for its end, and check its exit code."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            found = None
        assert found == code, f"exit code {found}\n{self.err[-6000:]}"
        return self

    def notes(self, name: str) -> list[dict[str, Any]]:
        """Return what ranks have written as `name` (see `scripts/rank.py`), in the order of attempts and ranks."""
        found = [json.loads(path.read_text()) for path in self.folder.glob(f"{name}-*.json")]
        return sorted(found, key=lambda note: (note["attempt"], note["rank"]))

    def processes(self, word: str) -> list[int]:
        """Return its processes whose command line has the word."""
        return [pid for pid in marked(self.mark) if word in command_line(pid)]

    @property
    def events(self) -> str:
        """Its journal."""
        (found,) = self.folder.glob("runs/*/latest/events.jsonl")
        return found.read_text()


def start(
    folder: Path,
    env: Mapping[str, str],
    script: str,
    args: Sequence[str],
    job: Mapping[str, Any],
    *,
    on_cluster: bool,
) -> Run:
    """Start a job with a script of `scripts`, one worker on each GPU, in a folder that is the script's own too."""
    settings = {
        "name": "gpu",
        "entrypoint": {"script": str(SCRIPTS / script), "args": [*args]},
        "nproc_per_node": count() if simulated() else "gpu",
        "exclude_after": 0,
        "show": "all",
        "report": False,
        **job,
    }
    settings["ray"] = {"address": env["RAY_ADDRESS"] if on_cluster else "none"}
    (folder / "job.json").write_text(json.dumps(settings))
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        command = [sys.executable, "-m", "raylaunch", "job.json"]
        process = subprocess.Popen(command, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return Run(process, folder, env[MARK])


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until something is so, and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)
    return time.monotonic() - began
