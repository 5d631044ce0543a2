"""What the bench of overhead runs: ranks that train a small model in step, on one thread each, until FOLDER/leave is there.

`trainer.py FOLDER`: a while of short steps, a while of long ones, and so on. In the end each rank writes
FOLDER/steps-RANK: for each step its kind (0: short, 1: long), its beginning and its end (CLOCK_MONOTONIC, ns).
"""

import os
import sys
import time
from array import array
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH = 512
BATCHES = (64, 448)
"""Steps of about 10 ms and about 50 ms on one core."""
IN_A_ROW = (40, 8)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, kind: int, times: array) -> None:  # type: ignore[type-arg]
    """So many of a kind."""
    inputs = torch.randn(BATCHES[kind], WIDTH)
    for _ in range(IN_A_ROW[kind]):
        began = time.monotonic_ns()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        times.extend((kind, began, time.monotonic_ns()))


def main() -> None:
    """Train."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    times = array("q")
    steps(model, optimizer, 0, times)
    aside = folder / f".there-{rank}"
    aside.write_text(str(os.getpid()))
    aside.rename(folder / f"there-{rank}")
    leaves = torch.zeros(1)
    while not leaves:
        for kind in range(len(BATCHES)):
            steps(model, optimizer, kind, times)
        leaves.fill_((folder / "leave").exists())
        dist.all_reduce(leaves)
    (folder / f"steps-{rank}").write_bytes(times.tobytes())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
