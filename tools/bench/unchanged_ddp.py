"""`unchanged.py`, with a model of 10 MB that is trained with DDP and Adam. What is passed is its first optimizer step."""

from collections.abc import Callable

import torch
import unchanged  # first of all, for the time of the first line


def training(width: int) -> Callable[[], None]:
    """A step of a model and its optimizer: with 2.6 million parameters, if its layers are 1024 wide."""
    nn = torch.nn
    layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, width // 2))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    unchanged.main(training)
