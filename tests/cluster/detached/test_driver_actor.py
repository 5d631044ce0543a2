"""`raylaunch -d` on a cluster: the driver is an actor. The same run is seen from a machine with another registry."""

from __future__ import annotations

import json

import pytest

from tests.cluster.conftest import wait_until
from tests.warm_command import WarmCommand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SCRIPT = """
import os, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("SECRET_OF_MINE"), flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def test_a_run_whose_driver_is_an_actor(launcher, tmp_path):
    """It goes on after the command, is found by others, attached to and ended. Workers have the environment."""
    env = {"SECRET_OF_MINE": "hunter2", "XDG_STATE_HOME": str(tmp_path / "state")}
    script = launcher.script(SCRIPT)
    (tmp_path / "job.yaml").write_text(
        json.dumps({"entrypoint": {"script": script}, "nnodes": 2, "placement": "pack", "preload": []})
    )
    started = launcher.python("raylaunch", "-d", "job.yaml", env=env)
    assert started.returncode == 0, started.stderr
    run_id = started.stdout.splitlines()[0]
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}

    def listed() -> list[tuple[str, int]]:
        rows = json.loads(launcher.python("raylaunch", "ps", "--json", env=elsewhere).stdout)["runs"]
        return [(row["state"], row["workers"]) for row in rows if row["id"] == run_id]

    wait_until(lambda: listed() == [("running", 2)], 100, "the run to be listed")
    environ, warm = launcher.cluster.env(**elsewhere), launcher.cluster.warm
    attached = WarmCommand(warm, "raylaunch", "attach", "--since", "1h", run_id, env=environ, cwd=tmp_path)
    line = attached.stdout.readline()  # first, since an ended run is not found from elsewhere any more
    (tmp_path / "end").touch()
    assert attached.wait() == 0, attached.stderr.read()
    assert line == "rank 0 of 2 hunter2\n"
    folder = tmp_path / "runs" / "train" / run_id
    assert (folder / "attempt-1" / "rank-0" / "stdout.log").read_text() == "rank 0 of 2 hunter2\n"
    wait_until(lambda: "all 2 workers finished" in (folder / "driver.log").read_text(), 100, "the driver's last words")
