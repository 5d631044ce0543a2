"""Runs on Ray nodes that people restart, resize, drain and stop: no step is lost, and no restart is spent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Launcher, left_in_ray, wait_until
from tests.private_cluster import WARM_TORCH, Cluster, private_cluster
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TRAIN = """
import os, time
from raylaunch import worker

begin = int(open("step.txt").read()) if os.path.exists("step.txt") else 0
for step in range(begin, 100_000):
    with open(f"steps-{os.environ['RANK']}.txt", "a") as file:
        file.write(f"{step}\\n")
    worker.heartbeat()
    time.sleep(0.02)
    if worker.should_checkpoint(step):
        if os.environ["RANK"] == "0":
            with open("step.txt.new", "w") as file:
                file.write(str(step + 1))
            os.replace("step.txt.new", "step.txt")
        worker.checkpointed(step)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three nodes with a CPU each."""
    with private_cluster(cpus=1, lean=True) as cluster:
        cluster.add_node(cpus=1)
        cluster.add_node(cpus=1)
        yield cluster


@pytest.fixture
def start(three: Cluster, tmp_path: Path) -> Iterator[Callable[..., WarmCommand]]:
    """Return what starts `raylaunch` there with arguments, in a folder that is also that of the state."""
    assert three.warm is not None
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    started: list[WarmCommand] = []

    def command(*arguments: str, **env: str) -> WarmCommand:
        started.append(WarmCommand(three.warm, "raylaunch", *arguments, env=three.env(**state | env), cwd=tmp_path))
        return started[-1]

    yield command
    for process in started:
        process.kill()
        process.wait()
    wait_until(lambda: left_in_ray(three) == [], 100, "actors and placement groups to be gone")


def test_what_people_request_loses_no_step(start, tmp_path: Path):
    """Commands from another process. Rank 0 does each step once, over all attempts."""
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--nnodes", "3", "--max-restarts", "0", "--set", "run_id=one", "--set", "preload=[]"]

    def do(*arguments: str) -> None:
        process = start(*arguments)
        _, err = process.communicate(200)
        assert process.returncode == 0, (arguments, err)

    run = start(*flags, "train.py")
    events = tmp_path / "runs" / "train" / "one" / "events.jsonl"
    wait_until(lambda: events.exists() and events.read_text().count("WorkersStarted") >= 3, 200, "three workers")
    wait_until((tmp_path / "steps-0.txt").exists, 200, "a step")
    do("restart", "one")
    do("resize", "1:2", "one")
    do("drain", "node-2", "one")
    do("stop", "-y", "one")
    run.communicate(200)
    assert run.returncode == 143
    result = json.loads(events.with_name("result.json").read_text())
    assert [len(attempt["roster"]) for attempt in result["attempts"]][:3] == [3, 3, 2]
    assert "node-2" not in result["attempts"][-1]["roster"]
    assert all(failure["stopped"] for attempt in result["attempts"] for failure in attempt["failures"])
    steps = [int(line) for line in (tmp_path / "steps-0.txt").read_text().split()]
    assert steps == list(range(len(steps)))


KEEPS = """
import os, time
import torch
from raylaunch.worker import State, elastic

@elastic(backend="gloo")
def train():
    state = State(every=1)
    for step in range(state.restore(), 100_000):
        state["done"] = state.get("done", int(os.environ["RANK"])) + 1
        assert state["done"] == step + 1 + int(os.environ["RANK"])
        with open(f"steps-{os.environ['RANK']}.txt", "a") as file:
            file.write(f"{step}\\n")
        time.sleep(0.02)
        state.commit(step)

if os.path.exists("elastic"):
    train()
else:
    train.__wrapped__()
"""
"""Each rank has a state of its own."""


@pytest.mark.parametrize("is_elastic", [False, True])
def test_the_only_node_is_drained_and_the_one_that_replaces_it_goes_on_with_no_step_lost(
    start, warm_torch: WarmPython, tmp_path: Path, is_elastic
):
    """It makes no copies before, and the other node starts when it is drained."""
    (tmp_path / "train.py").write_text(KEEPS)
    if is_elastic:
        (tmp_path / "elastic").touch()
    flags = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0", "--set", "cpus_per_worker=0.5"]

    def steps(rank: int) -> list[int]:
        path = tmp_path / f"steps-{rank}.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    run = start(*flags, "--set", "run_id=one", "train.py", **{WARM_TORCH: str(warm_torch.executable())})
    wait_until(lambda: len(steps(0)) > 20, 200, "steps")
    start("drain", "node-1", "one").communicate(200)
    events = tmp_path / "runs" / "train" / "one" / "events.jsonl"
    wait_until(lambda: events.read_text().count("WorkersStarted") >= 2, 200, "another attempt")
    reached = len(steps(0))
    wait_until(lambda: len(steps(0)) > reached + 20, 200, "more steps")
    start("stop", "-y", "one").communicate(200)
    _, err = run.communicate(200)
    assert run.returncode == 143, err
    result = json.loads(events.with_name("result.json").read_text())
    first, second = (attempt["roster"] for attempt in result["attempts"])
    assert first == ["node-1"]
    assert set(first).isdisjoint(second)
    for rank in (0, 1):
        assert steps(rank) == list(range(len(steps(rank)))), err


ENDS = """
import os, time
from raylaunch.worker import context, should_checkpoint
from raylaunch.worker.heartbeats import heartbeat_writer

should_checkpoint(0)
open(f"up-{context().rank}", "w").close()
while context().attempt == 1 and context().rank == 1:
    time.sleep(0.01)
    if heartbeat_writer.current_writer().is_save_proposed(10**9):
        open("end", "w").close()
        break
while not os.path.exists("end"):
    time.sleep(0.01)
time.sleep(1 - context().rank)
"""
"""Rank 1 comes to its end when it has been asked to save, and rank 0 a little later."""


def test_a_drain_of_the_only_host_is_refused_and_a_resize_is_not(launcher: Launcher):
    """Two nodes are on one host. The resize that the answer proposes is done; so is one right after the start."""
    env = {"XDG_STATE_HOME": str(launcher.folder / "state")}
    (launcher.folder / "step.txt").write_text("0")
    run = launcher.start(
        env=env, nnodes="1:2", nproc_per_node=1, run_id="one", entrypoint={"script": launcher.script(TRAIN)}
    )
    wait_until(lambda: [*launcher.folder.glob("state/raylaunch/runs/2*.json")], 200, "the run's entry in the registry")

    def do(*arguments: str) -> tuple[int, str]:
        process = launcher.command("raylaunch", *arguments, env=env)
        _, err = process.communicate(200)
        return process.returncode, err

    code, said = do("resize", "1:2", "one")
    assert code == 0, said
    wait_until(lambda: (run.run_dir / "events.jsonl").read_text().count("WorkersStarted") >= 2, 200, "two workers")
    for _ in range(2):
        code, said = do("drain", "node-2", "one")
        assert (code, said.splitlines()) == (
            1,
            [
                (
                    "error: train one: the cluster has no other host that could take the place of node-2, and node-1 is "
                    "on the same host: `raylaunch resize 1` gives up a node"
                )
            ],
        )
    code, said = do("resize", "1", "one")
    assert code == 0, said
    assert said.splitlines()[-1].endswith(" runs with 1 worker on 1 node")
    assert do("stop", "-y", "one")[0] == 0
    run.wait()
    assert run.code == 143, run.err


def test_workers_that_come_to_their_end_when_they_are_to_save(launcher: Launcher):
    """All of them have finished, so the run has. It is not started once more for the change that was planned."""
    env = {"XDG_STATE_HOME": str(launcher.folder / "state")}
    run = launcher.start(env=env, nproc_per_node=1, run_id="one", entrypoint={"script": launcher.script(ENDS)})
    wait_until(lambda: len([*launcher.folder.glob("up-*")]) == 2, 200, "two workers")
    wait_until(lambda: (run.run_dir / "events.jsonl").read_text().count("WorkersStarted") == 2, 200, "the driver")
    launcher.command("raylaunch", "restart", "one", env=env).communicate(200)
    run.wait()
    assert run.code == 0, run.err
    assert "RequestCheckpoint" in (run.run_dir / "events.jsonl").read_text()
    assert len(run.result["attempts"]) == 1
