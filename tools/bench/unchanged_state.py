"""`unchanged.py`, with 100 MB of state in each rank, of which the model is a small part. What is passed is a new step.

Under raylaunch the state is restored by `State`, under torchrun by `torch.load` from tmpfs, where rank 0 has written it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import unchanged  # first of all, for the time of the first line

TENSORS = 25


class Holds:
    """What is large, and takes no time in a step."""

    def __init__(self, tensors: int = TENSORS) -> None:
        """`tensors`: how many there are, of 4 MB each."""
        self.tensors = [torch.zeros(1_000_000) for _ in range(tensors)]

    def state_dict(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(self.tensors))

    def load_state_dict(self, state: dict[int, torch.Tensor]) -> None:
        self.tensors = [*state.values()]


def committed(objects: dict[str, Any]) -> Callable[[], None]:
    """Restore by `State`; return what commits after a step."""
    from raylaunch.worker import State

    state = State(**objects)
    completed = [state.restore()]

    def commit() -> None:
        state.commit(completed[0])
        completed[0] += 1

    return commit


def saved(objects: dict[str, Any]) -> Callable[[], None]:
    """Restore by `torch.load`; return what saves after a step."""
    path = Path(os.environ["BENCH_TMPFS"]) / "state.pt"
    if path.exists():
        for name, state in torch.load(path).items():
            objects[name].load_state_dict(state)

    def save() -> None:
        if dist.get_rank() == 0:
            torch.save({name: one.state_dict() for name, one in objects.items()}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)

    return save


def training(width: int) -> Callable[[], None]:
    """A step of a small model, after which everything is committed or saved."""
    del width
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    objects = {"model": model, "optimizer": optimizer, "holds": Holds()}
    after = committed(objects) if "RAYLAUNCH_ATTEMPT" in os.environ else saved(objects)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        after()

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    unchanged.main(training)
