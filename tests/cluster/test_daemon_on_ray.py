"""`keep_warm` for commands: the daemon keeps the driver and its agents, which all end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raylaunch.cli.daemon import socket_dir
from raylaunch.errors import ExitCode
from tests.cluster.conftest import Launcher, Run, left_in_ray
from tests.private_cluster import MARK, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@dataclass
class Warm:
    """Commands that share a daemon."""

    launcher: Launcher
    runtime: Path

    def start(self, script: str, *overrides: str) -> Run:
        """Run a command. All have this fixture's mark, so that their agents have equal keys."""
        entrypoint = {"script": self.launcher.script(script)}
        words = [f"env.{MARK}={self.runtime.name}", *overrides]
        return self.launcher.start(*words, env=self.env, entrypoint=entrypoint, keep_warm=1000, shutdown_timeout=100)

    @property
    def env(self) -> dict[str, str]:
        return {"XDG_RUNTIME_DIR": str(self.runtime)}

    @property
    def drivers(self) -> list[int]:
        return [socket_dir.pid_of(path) for path in socket_dir.sockets(self.runtime / "raylaunch")]

    def ps(self, *words: str) -> str:
        done = self.launcher.python("raylaunch", "ps", *words, env=self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def warm(launcher: Launcher, until) -> Iterator[Warm]:
    """Kill the daemons afterwards, and check that their agents end soon."""
    found = Warm(launcher, Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp")))
    yield found
    for pid in found.drivers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not marked(found.runtime.name), 100, "fork servers to be gone")
    shutil.rmtree(found.runtime)


def test_the_second_command_finds_the_driver_and_its_agents(warm, until):
    """Only workers are started for it. `ps` shows what is kept, and ends it."""
    script = "import os, sys\nprint(os.getppid(), flush=True)\nsys.exit(int(sys.argv[-1]) if os.environ['RANK'] == '3' else 0)"
    runs = [warm.start(script, "show=all", f"entrypoint.args=[{code}]").wait() for code in (0, 7)]
    first, second = ({line.split()[-1] for line in run.out.splitlines()} for run in runs)
    assert [run.code for run in runs] == [0, 1], runs[1].err
    assert len(first) == 2, "one fork server for each node"
    assert second, "rank 3 at least"
    assert second <= first
    assert "rank 3" in runs[1].err
    (pid,) = warm.drivers
    listed = warm.ps()
    assert f"pid {pid}: idle for " in listed
    assert listed.count(": idle agent for 2 workers, ") == 2
    assert "it ends" in warm.ps("--end")
    until(lambda: not marked(warm.runtime.name) and not left_in_ray(warm.launcher.cluster), 100, "all to be gone")


def test_a_command_and_a_driver_that_die(warm, until):
    """Workers may save when their command is killed; they are killed with the driver."""
    script = """import signal, sys, time
def save(*_):
    print('saved', flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print('up', flush=True)
while True:
    time.sleep(0.01)
"""
    run = warm.start(script)
    until(lambda: [log(run, rank) for rank in range(4)] == ["up\n"] * 4, 100, "all workers to be up")
    run.process.kill()
    until(lambda: [log(run, rank) for rank in range(4)] == ["up\nsaved\n"] * 4, 100, "all workers to save")
    until(lambda: "idle for" in warm.ps(), 100, "the end of the run")
    (pid,) = warm.drivers
    shutil.rmtree(run.folder / "runs")
    run = warm.start(script)
    until(lambda: [log(run, rank) for rank in range(4)] == ["up\n"] * 4, 100, "all workers to be up")
    os.kill(pid, signal.SIGKILL)
    run.wait()
    assert run.code == ExitCode.INTERNAL
    assert "the daemon that ran this job died" in run.err
    until(lambda: not marked(warm.runtime.name), 100, "workers and fork servers to be gone")


def log(run: Run, rank: int) -> str:
    return run.log(rank) if list(run.folder.glob("runs/*/*/events.jsonl")) else ""
