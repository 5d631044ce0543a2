"""Commands on a run that another machine has started, where the machines share no disk for its logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.errors import ExitCode
from tests.cluster.conftest import wait_until
from tests.hosts.hosts import Hosts
from tests.warm_command import WarmCommand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SCRIPT = """
import os, time
rank, attempt = os.environ["RANK"], os.environ["RAYLAUNCH_ATTEMPT"]
print(f"attempt {attempt} of rank {rank}", flush=True)
while attempt == "1" and not os.path.exists("break"):
    time.sleep(0.02)
if attempt == "1" and rank == "2":
    os._exit(3)
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def private(hosts: Hosts, tmp_path: Path) -> Iterator[Path]:
    """A folder whose content is another one on each host."""
    folder = tmp_path / "private"
    folder.mkdir()
    for host in hosts.hosts:
        hosts.run_in(host, ["mount", "-t", "tmpfs", "none", str(folder)])
    yield folder
    for host in hosts.hosts:
        with contextlib.suppress(Exception):
            hosts.run_in(host, ["umount", "--lazy", str(folder)])


def test_a_run_is_looked_at_followed_and_stopped_from_another_machine(launcher, hosts, private, tmp_path):
    """Over a restart. Somebody without the cluster's token gets nothing."""
    elsewhere = hosts[1]

    def start(*arguments: str, **env: str) -> WarmCommand:
        env = hosts.env(XDG_STATE_HOME=str(tmp_path / "elsewhere"), TMPDIR=str(tmp_path)) | env
        return WarmCommand(hosts.warm, "raylaunch", *arguments, env=env, cwd=tmp_path, beside=elsewhere.init)

    def said(*arguments: str, code: int = 0, **env: str) -> str:
        process = start(*arguments, **env)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, err
        return out

    run = launcher.start(SCRIPT, log_dir=str(private), run_id="one", max_restarts=1)
    seen: list[str] = []

    def lines(attempt: int) -> bool:
        states = [each["state"] for each in json.loads(said("ps", "--json"))["runs"]]
        seen[:] = said("logs", "one").splitlines() if states == ["running"] else []
        return seen == [f"[{rank}] attempt {attempt} of rank {rank}" for rank in range(3)]

    run.wait_for(lambda: lines(1), 100, "the lines of three nodes")
    assert said("logs", "--rank", "2", "one") == "attempt 1 of rank 2\n"
    shown = json.loads(said("status", "--json", "one"))
    assert (shown["state"], shown["host"], shown["folder"]) == ("running", hosts.head.name, f"{private}/train/one")
    node = next(each for each in shown["node_states"] if each["first_rank"] == 1)["name"]
    assert said("logs", "--node", node, "one") == "[1] attempt 1 of rank 1\n"
    timed = [json.loads(line) for line in said("logs", "--json", "one").splitlines()]
    assert [each["rank"] for each in timed if each["time"] is not None] == [0, 1, 2]
    assert said("logs", "--since", timed[2]["time"], "--rank", "2", "-t", "one").split()[0] == timed[2]["time"]
    assert said("logs", "--since", "2100-01-01", "one") == ""
    (cluster,) = [each for each in json.loads(said("doctor", "--json"))["findings"] if each["check"] == "cluster"]
    assert cluster["text"].endswith(f"has {len(hosts.hosts)} nodes")
    assert said("ps", RAY_AUTH_TOKEN="0" * 64).startswith("no run is going on")
    assert said("status", "one", code=ExitCode.USAGE, RAY_AUTH_TOKEN="0" * 64) == ""

    followed = start("logs", "-f", "one")
    assert sorted(followed.stdout.readline() for _ in range(3))[2] == "[2] attempt 1 of rank 2\n"
    (tmp_path / "break").touch()
    assert sorted(followed.stdout.readline() for _ in range(3))[2] == "[2] attempt 2 of rank 2\n"
    said("logs", "--sync-down", str(tmp_path / "copy"), "one")
    copied = {str(path.parent.relative_to(tmp_path / "copy")): path.read_text() for path in tmp_path.glob("copy/*/*/*")}
    assert copied == {
        f"attempt-{attempt}/rank-{rank}": f"attempt {attempt} of rank {rank}\n"
        for attempt in (1, 2)
        for rank in range(3)
    }
    stopped = start("stop", "-y", "one")
    _, err = stopped.communicate(timeout=200)
    assert stopped.returncode == 0
    assert err.splitlines()[-1].startswith("raylaunch: train one: stopped with exit code 143: stopped by ")
    assert run.wait().code == 143
    _, err = followed.communicate(timeout=200)
    assert (followed.returncode, err.splitlines()[-1][:43]) == (143, "raylaunch: train one: stopped with exit cod")
    wait_until(
        lambda: "one" not in [each["id"] for each in json.loads(said("ps", "-a", "--json"))["runs"]], 100, "its end"
    )
