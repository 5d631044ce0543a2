"""Killed workers that take long to end, as with much memory of a GPU, or pinned for one: they are waited for."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.test_without_cluster import alone, start
from tests.node.harness import go, hold

__all__ = ["alone"]

pytestmark = pytest.mark.timeout(200)
LONG = 3.0
"""Longer than the limits that `SHORT` sets."""
SHORT = """
from raylaunch.core.machine import transitions
from raylaunch.node.forkserver import server
assert hasattr(transitions, "STOP_MARGIN")
assert hasattr(server, "CLEANUP_SECONDS")
transitions.STOP_MARGIN = server.CLEANUP_SECONDS = 0.5
"""


def pid_in(path: Path, process: subprocess.Popen[str]) -> int:
    wait_until(lambda: path.exists() or process.poll() is not None, 100, f"{path.name}")
    assert path.exists(), process.communicate()[1]
    return int(path.read_text())


def is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


BEGINS = """
import os, pathlib, signal, time
attempt, rank = os.environ["RAYLAUNCH_ATTEMPT"], os.environ["RANK"]
def tell(name):
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", name)
"""
FAILS = f"""{BEGINS}
tell(f"pid-{{attempt}}-{{rank}}") if rank == "0" else None
if attempt == "1" and rank == "1":
    while not os.path.exists("held"):
        time.sleep(0.01)
    raise ValueError("this rank fails")
if attempt == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
"""


@contextlib.contextmanager
def failing(alone, **job: object) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Run until rank 1 has failed, and rank 0, which was killed for it, cannot end."""
    env, folder = alone
    (folder / "sitecustomize.py").write_text(SHORT)
    job = {"nnodes": 1, "shutdown_timeout": 0.5, **job}
    process = start(env | {"PYTHONPATH": str(folder)}, folder, FAILS, **job)
    pid = pid_in(folder / "pid-1-0", process)
    hold(pid)
    (folder / "held").touch()
    wait_until(lambda: is_dead(pid), 100, "the end of rank 0")
    yield process, pid, folder


def test_the_next_attempt_begins_when_all_workers_have_ended(alone):
    with failing(alone, max_restarts=1) as (process, pid, folder):
        time.sleep(LONG)
        assert not (folder / "pid-2-0").exists()
        go(pid)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert (folder / "pid-2-0").exists()
    assert "did not s" not in err


def test_a_run_that_failed_ends_when_all_workers_have_ended(alone):
    """Ray would give their GPUs to others before."""
    with failing(alone, max_restarts=0) as (process, pid, folder):
        time.sleep(LONG)
        assert process.poll() is None
        go(pid)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    events = folder / "runs" / "train" / "latest" / "events.jsonl"
    assert "did not stop its workers in time" not in events.read_text()
