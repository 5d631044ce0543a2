"""How long a restart takes with a CUDA context and nccl: of raylaunch, torchrun and Ray Train, in the same run."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys

import pytest

from tests.gpu import gpu_runs
from tests.gpu.gpu_runs import SCRIPTS, wait_until
from tests.private_cluster import MARK, end_marked

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]
WORKERS = 2 if gpu_runs.simulated() else gpu_runs.count()


def recoveries(folder, deaths):
    """Return the seconds from each death until the last rank was past its first all_reduce of the next attempt."""
    found = []
    for number in range(deaths):
        reduced = [float(path.read_text()) for path in folder.glob(f"reduced-{number + 1}-*")]
        found.append(max(reduced) - float((folder / f"death-{number}").read_text()))
    return sorted(found)


def measure(folder, command, deaths, env, record_property, code=0):
    """Run a launcher through the deaths, and record what the restarts took."""
    mark = secrets.token_hex(8)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env | {MARK: mark}, stdout=log, stderr=log)
    try:
        done = lambda: len(list(folder.glob(f"reduced-{deaths}-*"))) == WORKERS or process.poll() is not None  # noqa: E731
        wait_until(done, 90, "the restarts")
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass  # how it ends is not what is measured
    finally:
        end_marked(mark)
        process.wait()
    log = (folder / "log").read_text(errors="replace")[-3000:]
    assert len(list(folder.glob(f"reduced-{deaths}-*"))) == WORKERS, log
    found = recoveries(folder, deaths)
    record_property("restart", f"{found[len(found) // 2]:.2f} s (of {deaths}: {found[0]:.2f} to {found[-1]:.2f})")


def test_raylaunch(tmp_path, record_property):
    """A restart by raylaunch, from the SIGKILL to the first all_reduce."""
    words = ("--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=9")
    settings = ("--set", "exclude_after=0")
    command = [sys.executable, "-m", "raylaunch", *words, *settings, str(SCRIPTS / "marks.py"), str(tmp_path), "2"]
    measure(tmp_path, command, 2, gpu_runs.environment(), record_property)


def test_torchrun(tmp_path, record_property):
    """A restart by torchrun, from the SIGKILL to the first all_reduce."""
    words = ("--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=9")
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(SCRIPTS / "marks.py"), str(tmp_path), "2"]
    env = gpu_runs.environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    measure(tmp_path, command, 2, env, record_property)


def test_ray_train(tmp_path, cluster, record_property):
    """A restart by Ray Train, from the SIGKILL to the first all_reduce."""
    if lacks := [name for name in ("pandas", "pyarrow", "pydantic") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"Ray Train needs {', '.join(lacks)}")
    command = [sys.executable, str(SCRIPTS / "marks.py"), str(tmp_path), "1", "ray-train", str(WORKERS)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | cluster.env()
    measure(tmp_path, command, 1, env, record_property)
