"""No cluster at all: Ray is started in the process, for the one job, and goes with it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, end_marked, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]


@pytest.fixture
def alone(tmp_path):
    """An environment without any cluster, whose processes can all be found again."""
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {MARK: mark}
    yield env, tmp_path
    left = marked(mark)
    end_marked(mark)
    assert not left


def start(environ, folder: Path, script: str, *overrides: str, **job) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    job = {"entrypoint": {"script": "train.py"}, "nnodes": 2, "nproc_per_node": 2, "ray": {"address": "local"}} | job
    (folder / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "raylaunch", "job.yaml", *overrides]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_trains_and_leaves_nothing(alone):
    """2 x 2 workers on one machine, whatever its cores; after the end no process of Ray or ours is left."""
    env, folder = alone
    script = "import torch.distributed as d\nd.init_process_group('gloo')\nprint(d.get_world_size())\n"
    process = start(env, folder, script)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out == "4\n"
    assert "(127.0.0.1) is ready" in err


def test_driver_killed(alone):
    """kill -9 of the driver takes all workers and its Ray with it.

    Two of Ray's own helpers try for up to a minute to report the raylet's death to a head that is dead as well.
    """
    env, folder = alone
    ours = secrets.token_hex(8)
    process = start(env, folder, "import time\nprint('up', flush=True)\ntime.sleep(100)\n", env={MARK: ours})
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert len(marked(ours)) >= 4
    process.kill()
    process.communicate()
    wait_until(lambda: not marked(ours), 20, "our processes to end")
    wait_until(lambda: not marked(env[MARK]), 100, "Ray to end")


def test_too_much_for_this_machine(alone):
    """What a local Ray can never give is refused at once, not waited for."""
    env, folder = alone
    process = start(env, folder, "", gpus_per_worker=1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "this machine cannot hold the job" in err
    assert "GPUs free, 2 needed" in err
    assert out == ""
