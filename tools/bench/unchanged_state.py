"""`unchanged.py`, with 100 MB of state in each rank, of which the model is a small part. What is passed is a new step.

Under raylaunch the state is restored by `State`, under torchrun by `torch.load` from tmpfs, where rank 0 writes it after
each step.
"""

from collections.abc import Callable

import torch
import unchanged  # first of all, for the time of the first line
from saved import Saved, is_launched

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


def training(width: int) -> Callable[[], None]:
    """A step of a small model, after which everything is committed or saved."""
    del width
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    objects = {"model": model, "optimizer": optimizer, "holds": Holds()}
    if is_launched():
        from raylaunch.worker import State

        state = State(**objects)
    else:
        state = Saved(1, **objects)
    done = [state.restore()]

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        state.commit(done[0])
        done[0] += 1

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    unchanged.main(training)
