"""A run that is killed, and goes on with other numbers of ranks, has each sample of an epoch once, and has left out none."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from tests.private_cluster import free_ports
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

SAMPLES, EPOCHS = 101, 3
SCRIPT = f"""
import json, os, time
import torch, torch.distributed as dist
from pathlib import Path
from raylaunch.integrations.data import ElasticDataLoader
from raylaunch.worker import State

dist.init_process_group("gloo")
rank = dist.get_rank()
loader = ElasticDataLoader(torch.arange({SAMPLES}), batch_size=4)
state = State(every=3, loader=loader)
step = state.restore()
print("from", step, "with", dist.get_world_size(), flush=True)
while loader.epoch < {EPOCHS}:
    for batch in loader:
        dist.all_reduce(torch.ones(1))
        Path(f"{{step:03}}-{{os.environ['WORLD_SIZE']}}-{{rank}}").write_text(json.dumps(batch.tolist()))
        state.commit(step)
        step += 1
        time.sleep(float(os.environ["PAUSE"]))
state.finish()
print("ended after", step)
"""


def test_each_sample_comes_once_though_the_number_of_ranks_changes(warm_torch: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(SCRIPT)
    begins = []
    for number, ranks in enumerate((2, 3, 1)):
        world = start(warm_torch, tmp_path, ranks, pause=0.0 if number == 2 else 0.1)
        begins.append(int(world[0].stdout.readline().split()[1]))
        if number < 2:
            kill_after(world, tmp_path, begins[-1])
        else:
            assert [rank.communicate(120)[1] for rank in world] == [""]
    assert 0 == begins[0] < begins[1] < begins[2]
    taken = used(tmp_path, begins)
    assert len(taken) == sum(taken.values()) / EPOCHS == SAMPLES
    assert set(taken.values()) == {EPOCHS}


def start(warm: WarmPython, folder: Path, ranks: int, pause: float) -> list[WarmCommand]:
    (port,) = free_ports(1)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAYLAUNCH", "RANK", "WORLD"))}
    env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PAUSE": str(pause)}
    env |= {"RAYLAUNCH_DURABLE": "durable", "RAYLAUNCH_DURABLE_EVERY": "0.01", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    return [WarmCommand(warm, "trains", env=env | {"RANK": str(rank)}, cwd=folder) for rank in range(ranks)]


def kill_after(world: list[WarmCommand], folder: Path, begin: int) -> None:
    """Kill all ranks when a checkpoint is there that is newer than that from which they began."""
    try:
        while (
            max((int(path.name[5:]) for path in folder.glob("durable/step-*[0-9]") if path.suffix == ""), default=0)
            <= begin
        ):
            assert [rank.poll() for rank in world] == [None] * len(world)
            time.sleep(0.01)
    finally:
        for rank in world:
            rank.kill()
    for rank in world:
        rank.communicate()


def used(folder: Path, begins: list[int]) -> Counter[int]:
    """Return how often each sample was in a step that was not done again."""
    taken: Counter[int] = Counter()
    ends = [*begins[1:], 1000]
    for ranks, begin, end in zip((2, 3, 1), begins, ends, strict=True):
        for path in folder.glob(f"???-{ranks}-*"):
            if begin <= int(path.name[:3]) < end:
                taken.update(json.loads(path.read_text()))
    return taken
