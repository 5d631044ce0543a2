"""What needs the helpers that Ray has on each node, which `lean_ray.py` replaces elsewhere.

`ray job submit --working-dir . -- python -m raylaunch job.yaml`: logs and exit code come through Ray; `ray.working_dir`;
and metrics.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import BIN, Cluster, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with Ray's dashboard, which nothing else needs, and with an agent for jobs, which Ray awaits for 10 s only."""
    with private_cluster(cpus=4, dashboard=True, lean=True) as found:
        session = found.folder / "session_latest"
        wait_until(lambda: [*session.rglob("dashboard_agent_listen_port*")], 150, "the agent for jobs")
        yield found


def submit(cluster, folder):
    command = [str(BIN / "ray"), "job", "submit", "--address", cluster.dashboard, "--working-dir", str(folder)]
    command += ["--", sys.executable, "-m", "raylaunch", "job.yaml"]
    env = cluster.env()
    del env["RAY_ADDRESS"]  # the job has its own from Ray
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_submitted(cluster, tmp_path):
    """The script is in the working folder; its output and the report are in the job's logs, and the job fails with it."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] != '0':\n"
        "    time.sleep(1000)  # else this rank may fail before rank 0 has printed anything\n"
        "print('world', os.environ['WORLD_SIZE'])\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    job = {"entrypoint": {"script": "train.py", "args": [5]}, "nproc_per_node": 4, "preload": []}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = submit(cluster, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "world 4" in done.stdout
    assert "exited with code 5" in done.stdout + done.stderr
    assert "Ray will delete the run folder /" in done.stdout + done.stderr


def test_working_folder_by_ray(launcher, cluster):
    """`ray.working_dir` copies the folder to the nodes, and workers run in the copy."""
    launcher.script("import os, data; print(os.getcwd() != os.environ['HERE'], data.WORDS)")
    launcher.script("WORDS = 'from the copy'", name="data.py")
    run = launcher.run(
        entrypoint={"script": "train.py"},
        ray={"working_dir": "."},
        log_dir=str(launcher.folder / "runs"),
        env={"HERE": str(launcher.folder)},
        nnodes=1,
    )
    assert run.code == 0, run.err
    assert run.out == "True from the copy\n"
    assert "Ray will delete the folder in which the workers run: give" in run.err
    assert "run folder" not in run.err


def test_no_metrics_of_the_driver_are_exported(launcher, cluster):
    """By Ray's own log of the driver. The script does not have the variables."""
    script = launcher.script("import os\nprint(sorted(name for name in os.environ if name.startswith('RAY_enable')))")
    run = launcher.start(entrypoint={"script": script}, nnodes=1, nproc_per_node=1, show="all", env={}).wait()
    assert (run.code, run.out) == (0, "[]\n")
    (log,) = (cluster.folder / "session_latest" / "logs").glob(f"python-core-driver-*_{run.process.pid}.log")
    assert "Disabled stats." in log.read_text()
