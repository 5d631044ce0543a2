"""What the bench of `WorkerGroup` runs: `group_caller.py FOLDER SIZE`, a program that uses the Ray cluster of RAY_ADDRESS.

SIZE is a JSON object with the numbers of `worker_group.Size`. The samples go to `found.json` in the folder: by figure
and by contender, in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from torch.nn.parallel import DistributedDataParallel

import raylaunch
import raylaunch.worker

GROUP, ACTORS, LAUNCH, TRAIN = "raylaunch", "bare actors", "launch", "Ray Train"
RANKS = 4
_WARM = 3
"""Calls before those that count."""
_CALM = 3
"""Steps before each death."""
_SETTINGS: dict[str, Any] = {"show": "none", "backend": "none", "preload": ["torch"], "placement": "pack"}
Samples = dict[str, list[float]]


class Idle:
    """Does next to nothing, in a rank or as an actor."""

    def nothing(self) -> None:
        """Return at once."""

    def take(self, array: np.ndarray) -> int:
        """Look at each page of an array."""
        return int(array[:: 4096 // array.itemsize].sum())


class Reader:
    """Reads its part of a dataset."""

    def epochs(self, number: int) -> list[tuple[float, float]]:
        """Return when each epoch has begun and ended."""
        return read(raylaunch.worker.dataset_shard("train"), number)


def read(shard: Any, epochs: int) -> list[tuple[float, float]]:
    """Read all batches of a part, and one epoch before, which does not count. Return when each has begun and ended."""
    found = []
    for _ in range(1 + epochs):
        began = time.monotonic()
        for batch in shard.iter_batches(batch_size=1024):
            batch["data"].sum()
        found.append((began, time.monotonic()))
    return found[1:]


class Learner:
    """A DDP model of 10 MB, and 100 MB of `State` with it, of which survivors keep theirs."""

    elastic = True

    def __init__(self, megabytes: int) -> None:
        layers = (torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 512))
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.tables = torch.nn.Module()
        self.tables.register_buffer("table", torch.zeros(megabytes * 250_000))
        self.state = raylaunch.worker.State(every=1, model=self.model, optimizer=self.optimizer, tables=self.tables)

    def step(self, death: str) -> int:
        """Train for one step. `death`: in the middle rank 1 dies, and writes to this file when; "": it does not."""
        done = self.state.get("done", 0)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 1024)).square().mean()
        if death and os.environ["RANK"] == "1" and not os.path.exists(death):
            Path(death).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        self.optimizer.step()
        self.state["done"] = done + 1
        self.state.commit(done)
        return done + 1


def in_turn(rounds: int, contenders: dict[str, Callable[[], object]]) -> Samples:
    """Call the contenders in turn, and return the seconds of each but for the first ones."""
    found: Samples = {name: [] for name in contenders}
    for number in range(_WARM + rounds):
        for name, call in contenders.items():
            began = time.monotonic()
            call()
            if number >= _WARM:
                found[name].append(time.monotonic() - began)
    return found


def calls(size: dict[str, int]) -> dict[str, Samples]:
    """Call four ranks and four actors: without arguments, and with one object."""
    actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(RANKS)]
    ref = ray.put(np.ones(size["megabytes"] * 125_000))
    with raylaunch.WorkerGroup(Idle, nproc_per_node=RANKS, **_SETTINGS) as group:
        found = {
            "call": in_turn(
                size["calls"],
                {
                    GROUP: lambda: group.call("nothing"),
                    ACTORS: lambda: ray.get([actor.nothing.remote() for actor in actors]),
                },
            ),
            "object": in_turn(
                size["objects"],
                {
                    GROUP: lambda: group.call("take", ref),
                    ACTORS: lambda: ray.get([actor.take.remote(ref) for actor in actors]),
                },
            ),
        }
    for actor in actors:
        ray.kill(actor)
    return found


def deaths(size: dict[str, int], folder: Path) -> Samples:
    """Have rank 1 die in a call, again and again. Seconds from each death until all ranks have answered."""
    found = []
    settings = _SETTINGS | {"backend": "gloo", "max_restarts": size["deaths"], "preload": ["torch", "torch._dynamo"]}
    with raylaunch.WorkerGroup(Learner, size["megabytes"], nnodes=2, nproc_per_node=RANKS // 2, **settings) as group:
        for number in range(size["deaths"]):
            for _ in range(_CALM):
                done = group.call("step", "")
            death = folder / f"death-{number}"
            assert group.call("step", str(death), retry=True) == [done[0] + 1] * RANKS
            found.append(time.monotonic() - float(death.read_text()))
    return {GROUP: found}


def starts(size: dict[str, int], folder: Path) -> Samples:
    """Start four ranks as a group and by `launch`, by turns the one and the other first. Seconds until all are there."""
    found: Samples = {GROUP: [], LAUNCH: []}
    for number in range(size["starts"]):
        for name in sorted(found, reverse=bool(number % 2)):
            found[name].append(_start(name, str(folder / f"there-{number}-")))
    return found


def datasets(size: dict[str, int], folder: Path) -> Samples:
    """Read a dataset with four ranks, then with four workers of Ray Train. Seconds of each epoch, until all are done."""
    rows = size["megabytes"] * 1000
    dataset = ray.data.range_tensor(rows, shape=(125,), override_num_blocks=16).materialize()
    found: Samples = {GROUP: [], TRAIN: []}
    settings = _SETTINGS | {"cpus_per_worker": 0.1, "nproc_per_node": RANKS}
    for _ in range(size["readers"]):
        with raylaunch.WorkerGroup(Reader, datasets={"train": dataset}, **settings) as group:
            found[GROUP] += _epochs(group.call("epochs", size["epochs"]))
        if size["of_ray_train"]:
            found[TRAIN] += _epochs(_read_by_ray_train(dataset, size["epochs"], folder))
    return {name: times for name, times in found.items() if times}


def _epochs(by_rank: list[list[tuple[float, float]]]) -> list[float]:
    return [max(end for _, end in ranks) - min(begin for begin, _ in ranks) for ranks in zip(*by_rank, strict=True)]


def _read_by_ray_train(dataset: Any, epochs: int, folder: Path) -> list[list[tuple[float, float]]]:
    import ray.train
    from ray.train.torch import TorchTrainer

    def work() -> None:
        found = read(ray.train.get_dataset_shard("train"), epochs)
        (folder / f"read-{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(found))

    TorchTrainer(
        work,
        datasets={"train": dataset},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(name="read", storage_path=str(folder / "storage")),
    ).fit()
    return [json.loads((folder / f"read-{rank}.json").read_text()) for rank in range(RANKS)]


def _start(name: str, path: str) -> float:
    settings = _SETTINGS | {"nnodes": 2, "nproc_per_node": RANKS // 2, "backend": "gloo"}
    began = time.monotonic()
    if name == GROUP:
        with raylaunch.WorkerGroup(Idle, **settings):
            return time.monotonic() - began
    raylaunch.launch(come, args=(path,), **settings)
    return max(float(Path(f"{path}{rank}").read_text()) for rank in range(RANKS)) - began


def come(path: str) -> None:
    """Write down when this rank has come."""
    Path(path + os.environ["RANK"]).write_text(str(time.monotonic()))


def main(folder: Path, size: dict[str, int]) -> None:
    """Measure one after the other."""
    ray.init(log_to_driver=False)
    os.chdir(folder)
    found = {**calls(size), "data": datasets(size, folder), "death": deaths(size, folder)}
    found["start"] = starts(size, folder)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
