"""A `WorkerGroup` over several hosts, of which one dies in the middle of calls."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, WARM_TORCH

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import asyncio, json, os, socket
import ray, raylaunch, raylaunch.worker

class Learner:
    def __init__(self):
        import torch, torch.distributed
        self.torch = torch
        self.state = raylaunch.worker.State(every=1)

    def step(self):
        ranks = self.torch.ones(1)
        self.torch.distributed.all_reduce(ranks)
        done = self.state["done"] = self.state.get("done", 0) + 1
        self.state.commit(done - 1)
        return socket.gethostname(), done, int(ranks)

async def main():
    restarts = []
    settings = {"nproc_per_node": 1, "show": "none", "preload": ["torch"]}
    with raylaunch.WorkerGroup(Learner, nnodes="2:3", on_restart=restarts.append, **settings) as group:
        seen = [await group.submit("step")]
        while not restarts:
            try:
                seen.append(await group.submit("step"))
            except raylaunch.RankRestartedError as error:
                completed = error.restart.completed
            await asyncio.sleep(0.01)
        after = await group.submit("step")
    sizes = [(each.world_size_before, each.world_size) for each in restarts]
    first = [step for _, step, _ in seen[0]], [ranks for *_, ranks in seen[0]]
    print(json.dumps({
        "first": first,
        "each step once": [call[0][1] for call in seen] == [*range(1, len(seen) + 1)],
        "no step is invented": 0 < completed <= len(seen) + 1,
        "sizes": sizes,
        "goes on": after[0][1] - completed,
        "hosts": sorted(host for host, *_ in after),
        "ranks": [ranks for *_, ranks in after],
    }))

ray.init(log_to_driver=False, logging_level="ERROR")
asyncio.run(main())
"""


def copied(folder: Path) -> int:
    """Return how many steps all nodes have copied to other hosts, as the run's journal tells."""
    lines = [line for path in folder.glob("runs/*/latest/events.jsonl") for line in path.read_text().split("\n")[:-1]]
    events = [json.loads(line).get("event") for line in lines]
    return max((event.get("copied") or 0 for event in events if event), default=0)


def test_the_group_goes_on_without_a_host_that_was_killed(hosts, warm_torch, tmp_path):
    """The program awaits its calls in a running event loop. It goes on from what other hosts have copies of."""
    (tmp_path / "program.py").write_text(PROGRAM)
    torch = {WARM_TORCH: str(warm_torch.executable())}
    env = hosts.env(**{MARK: os.urandom(8).hex(), "PYTHONPATH": os.getcwd()} | torch)
    program = hosts.popen(hosts[0], [sys.executable, "program.py"], cwd=tmp_path, env=env, stdout=-1, stderr=-1)
    try:
        wait_until(lambda: copied(tmp_path) or program.poll() is not None, 120, "commits to be copied")
        assert program.poll() is None, program.communicate()
        hosts.kill(hosts[2])
        out, err = program.communicate(timeout=120)
    finally:
        program.kill()
    assert program.returncode == 0, err
    (found,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert found == {
        "first": [[1, 1, 1], [3, 3, 3]],
        "each step once": True,
        "no step is invented": True,
        "sizes": [[3, 2]],
        "goes on": 1,
        "hosts": [hosts[0].name, hosts[1].name],
        "ranks": [2, 2],
    }
