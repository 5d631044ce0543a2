"""The steps of `make gpu`: each runs one test file in a process of its own, for a limited time, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tools.gpu import results
from tools.gpu.results import StepResult

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "gpu"
SIMULATED = "RAYLAUNCH_GPU_SIMULATED"
"""In the environment where a GPU is simulated: a file that stands for the GPU's device."""
GPUS = "RAYLAUNCH_GPU_COUNT"
"""In the environment: how many GPUs there are, which takes seconds to find out."""
RESULTS = "RAYLAUNCH_GPU_RESULTS"
"""In the environment: the file to which a line is added for each test."""
_MARK = "RAYLAUNCH_GPU_STEP"
_LEAST_SECONDS = 10.0
"""With less, a step is not begun."""
_MOST_OUTPUT = 20_000
"""Characters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A test file, or one of its tests. `alone`: it measures, so nothing else runs meanwhile."""

    name: str
    seconds: float
    alone: bool = False
    folder: Path = FOLDER
    test: str = ""

    @property
    def file(self) -> Path:
        """The test file."""
        return self.folder / f"test_{self.name}.py"

    @property
    def tests(self) -> str:
        """What pytest is to run."""
        return f"{self.file}::{self.test}" if self.test else str(self.file)


STEPS = (
    Step("process_groups", 180.0),
    Step("bundles", 180.0),
    Step("hangs", 150.0),
    Step("survivors", 150.0),
    Step("binding", 100.0),
    Step("restarts", 120.0, alone=True),
    Step("contexts", 150.0, alone=True),
    Step("state", 150.0, alone=True),
    Step("restart_speed", 150.0, alone=True),
)
"""The most important first: what the time does not suffice for is not run, and said so."""
SMOKE = (
    Step("process_groups", 60.0, test="test_each_rank_has_its_gpu"),
    Step("bundles", 60.0, test="test_virtual_local_rank"),
    Step("contexts", 60.0, test="test_a_module_that_asks_for_cuda"),
    Step("restart_speed", 60.0, test="test_raylaunch"),
)
"""A few tests, by which one sees that the program and the scripts run."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs steps with a Python until a deadline (CLOCK_MONOTONIC). `at_once`: how many of those that may share."""

    python: Path
    scratch: Path
    deadline: float
    env: dict[str, str]
    at_once: int = 1

    def run(self, steps: Iterable[Step], done: Callable[[StepResult], None]) -> None:
        """Run those that may share the machine, then those that measure, one after the other. `done`: after each."""
        steps = list(steps)
        with ThreadPoolExecutor(self.at_once) as pool:
            for future in as_completed(pool.submit(self.result, step) for step in steps if not step.alone):
                done(future.result())
        for step in steps:
            if step.alone:
                done(self.result(step))

    def result(self, step: Step) -> StepResult:
        """Run one step, and end everything that it has started."""
        left = self.deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            return StepResult(name=step.name, outcome=results.NOT_RUN)
        mark, lines, log = secrets.token_hex(8), self.scratch / f"{step.name}.jsonl", self.scratch / f"{step.name}.log"
        command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        command += [step.tests, f"--basetemp={self.scratch / step.name}", f"--rootdir={ROOT}"]
        env = self.env | {_MARK: mark, RESULTS: str(lines), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        began = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                code: int | None = process.wait(min(step.seconds, left))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(mark)
                process.wait()
        outcome = {0: results.PASSED, None: results.HUNG, 5: results.SKIPPED}.get(code, results.FAILED)
        tests = results.read(lines)
        if outcome == results.PASSED and all(test.outcome == results.SKIPPED for test in tests):
            outcome = results.SKIPPED
        said = "" if outcome == results.PASSED else log.read_text(errors="replace")[-_MOST_OUTPUT:]
        seconds = time.monotonic() - began
        return StepResult(name=step.name, outcome=outcome, seconds=seconds, tests=tests, output=said)


def end(mark: str, seconds: float = 20.0) -> None:
    """Kill all processes with the mark in their environment, and wait until they are gone."""
    deadline = time.monotonic() + seconds
    while (found := list(_marked(mark))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    needle = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
