"""Runs of an example under raylaunch and torchrun, and the death of one of its ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.examples.example import FOLDER, ROOT, Example

RANKS = 2
SECONDS = 240.0
"""After which a run is given up. An example should take 90 s at most, but the machine may be busy."""
_FOREIGN = ("RAYLAUNCH_", "TORCHELASTIC_", "PET_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "WANDB_", "MLFLOW_")
_DURABLE = "durable"
_COMPLETE = f"{_DURABLE}/step-*[0-9]"
_TAIL = 80


class RunError(Exception):
    """An example did not do what it promises. The message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that succeeded. `resumed`: after which step it went on, for each time that it did."""

    loss: str
    resumed: tuple[int, ...]
    seconds: float


def undisturbed(example: Example) -> Ended:
    """Run it under torchrun, and kill nothing."""
    with _Run(example, _torchrun(restarts=0)) as run:
        ended = run.result()
        if ended.resumed:
            raise RunError(run.describe("went on from something, though it began in an empty folder"))
        return ended


def killed_under_raylaunch(example: Example, look: Callable[[Path], None] | None = None) -> Ended:
    """Kill rank 1 in the middle under raylaunch, which restarts once. `look`: sees the working folder before it goes."""
    with _Run(example, _raylaunch()) as run:
        run.wait_for(example.kill_at, example.files)
        run.kill(_pid_of_raylaunch(run.folder))
        ended = run.result()
        (record,) = run.folder.glob("runs/*/latest/result.json")
        if (restarts := json.loads(record.read_text())["restarts"]) != 1:
            raise RunError(run.describe(f"had {restarts} restarts instead of 1"))
        if look is not None:
            look(run.folder)
        return run.resumed(ended)


def killed_under_torchrun(example: Example) -> Ended:
    """Kill rank 1 in the middle under torchrun, which restarts all ranks. `State` goes on from a folder on disk."""
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it, torchrun may not come up again
    if not example.files:
        variables |= {"RAYLAUNCH_DURABLE": _DURABLE, "RAYLAUNCH_DURABLE_EVERY": "0.01"}
    with _Run(example, _torchrun(restarts=1), variables) as run:
        run.wait_for(example.kill_at, example.files or _COMPLETE)
        run.kill(_pid_of_torchrun(run.process.pid))
        return run.resumed(run.result())


def executed(example: Example) -> float:
    """Run one that kills and compares by itself, and return how many seconds that takes."""
    is_notebook = example.script.endswith(".ipynb")
    words = ("-c", "from nbclient.cli import main; main()") if is_notebook else ()
    with _Run(example, (sys.executable, *words)) as run:
        return run.wait()


def _torchrun(restarts: int) -> tuple[str, ...]:
    words = ("torch.distributed.run", "--standalone", "--max-restarts", str(restarts), "--nproc-per-node", str(RANKS))
    return (sys.executable, "-m", *words)


def _raylaunch() -> tuple[str, ...]:
    words = ("raylaunch", "--standalone", "--max-restarts", "1", "--nproc-per-node", str(RANKS), "--progress", "off")
    return (sys.executable, "-m", *words)


class _Run:
    """A command in a session of its own, in a folder of its own, with what it prints in a file there."""

    def __init__(self, example: Example, launcher: Sequence[str], variables: dict[str, str] | None = None) -> None:
        self._example, self._began = example, time.monotonic()
        self._scratch = tempfile.TemporaryDirectory(prefix="rlx-", ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
        env |= {"XDG_STATE_HOME": str(self.folder / "state"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        script = FOLDER / example.script
        if script.suffix == ".ipynb":
            script = Path(shutil.copy(script, self.folder))  # a kernel works in the folder of its notebook
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*launcher, str(script), *example.arguments],
                cwd=self.folder,
                env=env | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> _Run:  # noqa: PYI034  `Self` is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # both launchers end their ranks then
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._scratch.cleanup()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def wait_for(self, line: str, files: str) -> None:
        """Return when the output has a match, and there are such files, if any are to be."""
        while not (re.search(line, self.output) and (not files or any(self.folder.glob(files)))):
            if self.process.poll() is not None:
                raise RunError(
                    self.describe(f"ended before it could be killed, at {line!r} and with {files or 'no files'}")
                )
            self._check_time()
            time.sleep(0.02)

    def kill(self, pid: int) -> None:
        """Kill one of its ranks."""
        os.kill(pid, signal.SIGKILL)

    def wait(self) -> float:
        """Wait for its end, which must be good, and return how many seconds it took."""
        while self.process.poll() is None:
            self._check_time()
            time.sleep(0.05)
        if self.process.returncode:
            raise RunError(self.describe(f"ended with exit code {self.process.returncode}"))
        return time.monotonic() - self._began

    def result(self) -> Ended:
        """Wait for its end, and return what it has printed of its result."""
        seconds = self.wait()
        losses = re.findall(r"^final loss (\S+)$", self.output, re.MULTILINE)
        if len(losses) != 1:
            raise RunError(self.describe(f"printed {len(losses)} final losses instead of one"))
        resumed = tuple(int(step) for step in re.findall(r"^resuming after step (\d+)", self.output, re.MULTILINE))
        return Ended(losses[0], resumed, seconds)

    def resumed(self, ended: Ended) -> Ended:
        """Return the same, if it went on once, and not from its beginning."""
        if len(ended.resumed) != 1:
            raise RunError(self.describe(f"went on {len(ended.resumed)} times from what it had kept, and not once"))
        return ended

    def describe(self, what: str) -> str:
        """Return what is wrong with it, and the end of its output."""
        tail = "\n".join(f"    {line}" for line in self.output.splitlines()[-_TAIL:])
        return f"{self._example.name} {what}: {' '.join(map(str, self.process.args))}\n{tail}"  # type: ignore[arg-type]

    def _check_time(self) -> None:
        if time.monotonic() - self._began > SECONDS:
            raise RunError(self.describe(f"took more than {SECONDS:.0f} s"))


def _pid_of_raylaunch(folder: Path) -> int:
    """Return the process of rank 1, from the event log of a run with one node."""
    (log,) = folder.glob("runs/*/latest/events.jsonl")
    events = [json.loads(line).get("event") for line in log.read_text().splitlines()]
    started = [event for event in events if event is not None and event["is"] == "WorkersStarted"]
    return int(started[-1]["pids"][1])


def _pid_of_torchrun(agent: int) -> int:
    """Return the child of torchrun's process that is rank 1."""
    (pid,) = (pid for pid in _children(agent) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return pid


def _children(parent: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{parent}/task").iterdir():
        yield from map(int, (tasks / "children").read_text().split())
