"""`ray.address: local`: Ray is started in the process for one job, and ends with it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import COLD_WORKERS, MARK, NO_PRESTART, RAY_START, end_marked, marked

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]


@pytest.fixture
def alone(tmp_path):
    """Return an environment without any cluster, with a mark by which all processes can be found."""
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {MARK: mark} | NO_PRESTART
    try:
        yield env, tmp_path
        wait_until(lambda: not marked(mark), 100, "all processes to end")
    finally:
        end_marked(mark)


LEAN = f"""
import sys
sys.path.append({str(RAY_START.parent)!r})
import lean_ray
sys.path.pop()
lean_ray.make_lean({COLD_WORKERS!r})
from raylaunch.cli.main import main
sys.exit(main())
"""
"""`raylaunch`, whose Ray has none of the helpers that each raylet starts. A raylet ends if they have not written their ports
after 15 s, which is not enough for their imports on a busy machine.
"""


def start(environ, folder: Path, script: str, *overrides: str, **job) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    job = {"entrypoint": {"script": "train.py"}, "nnodes": 2, "nproc_per_node": 2, "ray": {"address": "local"}} | job
    (folder / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-c", LEAN, "job.yaml", *overrides]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_runs_and_leaves_nothing(alone):
    """2 x 2 workers on one machine, whatever its cores; after the end no process of Ray or ours is left.

    Rules match the machine, and a script finds this Ray.
    """
    env, folder = alone
    script = """
import os
if os.environ["RANK"] == "0":
    import ray
    ray.init(log_to_driver=False, logging_level="ERROR")
    print(os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], os.environ["KIND"], len(ray.nodes()))
"""
    process = start(env, folder, script, nodes={"127.0.0.1": {"env": {"KIND": "here"}}}, preload=[])
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out == "4 127.0.0.1 here 1\n"
    assert "(127.0.0.1) is ready" in err
    assert "matches no node" not in err
