"""What must work with each combination of versions, on a real Ray.

pytest runs this file when it is named; `make test`, which has tests of all of this, does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Launcher, Run, launcher, wait_until
from tests.private_cluster import Cluster, free_ports, private_cluster

__all__ = ["launcher"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

SECONDS = 300
start_methods = pytest.mark.parametrize("start_method", ["forkserver", "spawn"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with private_cluster(cpus=4, lean=True) as found:
        yield found


def python(launcher: Launcher, text: str) -> Any:
    """Run a program in a new interpreter, as a person does; return the JSON that it prints last."""
    path = launcher.folder / "program.py"
    path.write_text(textwrap.dedent(text))
    done = command(launcher, str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def command(launcher: Launcher, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=launcher.folder,
        env=launcher.cluster.env(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def without_gloo(text: str) -> str:
    """Return a worker's output without what gloo says in torch 2.9, whoever starts the worker: how many peers it has."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo]"))


RESTART = """
import os
import torch, torch.distributed as dist
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "attempt", attempt, flush=True)
dist.barrier()  # what another rank has not printed when one dies is lost
if attempt < 2 and rank == 1 + attempt:
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


@start_methods
def test_restart(launcher: Launcher, start_method: str) -> None:
    """Two nodes with two workers each, of which one is killed in each of the first two attempts."""
    script = launcher.script(RESTART)
    run = launcher.run(entrypoint={"script": script}, max_restarts=2, start_method=start_method, warm=False)
    assert run.code == 0, run.err
    assert without_gloo(run.out) == "sum 4 attempt 0\nsum 4 attempt 1\nsum 4 attempt 2\n"
    assert run.result["restarts"] == 2
    assert [len(attempt["roster"]) for attempt in run.result["attempts"]] == [2, 2, 2]
    assert without_gloo(run.log(3, attempt=3)) == "sum 4 attempt 2\n"


STEPS = """
import os, time
from pathlib import Path
import raylaunch.worker as launch
attempt, rank, world = (os.environ[name] for name in ("RAYLAUNCH_ATTEMPT", "RANK", "WORLD_SIZE"))
saved = Path("saved")
step = int(saved.read_text()) + 1 if saved.exists() else 0
with open(f"steps.{attempt}.{rank}", "w", buffering=1) as log:
    while not os.path.exists("enough"):
        launch.heartbeat()
        log.write(f"{attempt} {world} {rank} {step}\\n")
        time.sleep(0.05)
        if launch.should_checkpoint(step):
            if rank == "0":
                saved.write_text(str(step))
            launch.checkpointed(step)
        step += 1
"""
HEAD = "node:__internal_head__"
OTHER_NODE = f"""
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["NodeID"] for node in ray.nodes() if "{HEAD}" not in node["Resources"]]))
"""


@dataclass(frozen=True, slots=True)
class Step:
    attempt: int
    world: int
    rank: int
    number: int


def steps(folder: Path) -> list[Step]:
    """Return the steps that the workers of `STEPS` have recorded."""
    lines = (line for path in folder.glob("steps.*") for line in path.read_text().splitlines(keepends=True))
    return [Step(*map(int, line.split())) for line in lines if line.endswith("\n")]


def wait_for_world(run: Run, size: int, *, after: int) -> int:
    """Wait until all ranks of a world of that size are in their second step, in a later attempt; return it."""
    found: list[int] = []

    def trains() -> bool:
        assert run.process.poll() is None, run.process.communicate()
        done = Counter((step.attempt, step.rank) for step in steps(run.folder) if step.world == size)
        ranks = Counter(attempt for (attempt, _), count in done.items() if count > 1 and attempt > after)
        found[:] = [attempt for attempt, count in ranks.items() if count == size]
        return bool(found)

    wait_until(trains, 200, f"a world of {size} to train")
    return found[0]


def test_elastic(launcher: Launcher) -> None:
    """A second raylet comes, and leaves again when it is drained. No step is lost, and no restart is used up."""
    launcher.script(STEPS)
    run = launcher.start(
        entrypoint={"script": "train.py"}, nnodes="1:2", nproc_per_node=2, cpus_per_worker=2, max_restarts=0
    )
    first = wait_for_world(run, 2, after=0)
    launcher.cluster.add_node(cpus=4)
    second = wait_for_world(run, 4, after=first)
    (added,) = python(launcher, OTHER_NODE)
    how = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=200")
    where = (f"--address={launcher.cluster.address}", f"--node-id={added}")
    drained = command(launcher, "-m", "ray.scripts.scripts", "drain-node", *where, *how)
    assert drained.returncode == 0, drained.stdout + drained.stderr
    third = wait_for_world(run, 2, after=second)
    (run.folder / "enough").touch()
    run.wait()
    assert run.code == 0, run.err
    done = steps(run.folder)
    by_attempt = [{step.number for step in done if step.attempt == attempt} for attempt in (first, second, third)]
    assert sum(map(len, by_attempt)) == len(set().union(*by_attempt)), "a step was done in two attempts"
    assert set().union(*by_attempt) == set(range(max(by_attempt[-1]) + 1)), "a step was left out"


LAUNCH = """
import json, os, raylaunch
offset = 10
def work(x, *, scale):
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    total = torch.tensor([float(x)])
    dist.all_reduce(total)
    if x == 5 and rank == 2:
        raise KeyError("no such shard")
    return rank * scale + offset, float(total)
found = []
settings = dict(nnodes=2, nproc_per_node=2, placement="pack", show="none", start_method=START_METHOD)
if __name__ == "__main__":
    found.append(raylaunch.launch(work, (3,), {"scale": 2}, **settings))
    try:
        raylaunch.launch(work, (5,), {"scale": 2}, **settings)
    except raylaunch.JobFailedError as error:
        found.append([type(error.__cause__).__name__, str(error.__cause__)])
    print(json.dumps(found))
"""


@start_methods
def test_launch(launcher: Launcher, start_method: str) -> None:
    """A function on two nodes with two workers each: results by rank, and an exception that is its own cause."""
    assert python(launcher, f"START_METHOD = {start_method!r}\n{LAUNCH}") == [
        [[10, 12.0], [12, 12.0], [14, 12.0], [16, 12.0]],
        ["KeyError", "'no such shard'"],
    ]


SPAWN = """
import json, raylaunch
from torch.multiprocessing import ProcessRaisedException
def work(i, port, n):
    import os
    import torch, torch.distributed as dist
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=i, world_size=n)
    total = torch.tensor([i + 1.0])
    dist.all_reduce(total)
    assert total.item() == 6.0
    dist.destroy_process_group()
    if port == OTHER_PORT and i == 1:
        raise KeyError("no such shard")
if __name__ == "__main__":
    raylaunch.spawn(work, (PORT, 3), nprocs=3)
    try:
        raylaunch.spawn(work, (OTHER_PORT, 3), nprocs=3)
    except ProcessRaisedException as error:
        print(json.dumps([error.error_index, str(error.__cause__)]))
"""


def test_spawn(launcher: Launcher) -> None:
    """The program of torch's tutorial, and the exception that `torch.multiprocessing.spawn` would raise."""
    port, other = map(str, free_ports(2))
    assert python(launcher, f"PORT, OTHER_PORT = {port!r}, {other!r}\n{SPAWN}") == [1, "'no such shard'"]


def test_check(launcher: Launcher) -> None:
    """The self-check finds nothing wrong with two nodes of two workers each."""
    done = command(
        launcher, "-m", "raylaunch", "check", "--set", "placement=pack", "--nnodes", "2", "--nproc-per-node", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout.splitlines()[-1], done.stdout  # but something may be unsupported
