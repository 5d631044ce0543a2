"""What the bench of goodput runs: training with DDP that never ends by itself, and a state of 50 MB in each rank.

`unchanged_goodput.py FOLDER DEATHS [options]`: a step takes about 50 ms, most of which is sleep. Each rank writes its process
id to FOLDER/pid-RANK. Rank 0 notes each step in FOLDER/PID.steps: STEP BEGAN ENDED SAVED, in seconds of CLOCK_MONOTONIC,
which all processes of a machine share; what comes after ENDED is the commit or the checkpoint.

Under raylaunch `State` has the state, with its defaults, and workers that were not killed stay (`elastic`).
Otherwise rank 0 writes a checkpoint to tmpfs with `torch.save` after each 20 steps, and all ranks read it when they start.
"""

import os
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import unchanged
from saved import Saved, is_launched

from raylaunch.worker import State, elastic  # the latter before the process group is made

COMPUTE_SECONDS = 0.04
"""Of a step: what a device would need for the loss and the gradients."""
SAVE_EVERY = 20
WIDTH, ROWS, OUTPUTS = 1024, 12_000, 64
"""Of the model: an embedding that is not trained, of 49 MB, and a layer that is, of 0.3 MB. A larger gradient would
make the steps of four ranks on two CPUs vary by several milliseconds.
"""


def train(state: Any, args: Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train until this process is killed."""
    rank = dist.get_rank()
    unchanged.write(args.folder / f"pid-{rank}", str(os.getpid()))
    step = state.restore()
    with open(args.folder / f"{os.getpid()}.steps" if rank == 0 else os.devnull, "a", buffering=1) as notes:
        while True:
            began = time.monotonic()
            optimizer.zero_grad()
            loss = model(torch.arange(8)).square().mean()
            time.sleep(COMPUTE_SECONDS)
            loss.backward()
            optimizer.step()
            ended = time.monotonic()
            state.commit(step)
            notes.write(f"{step} {began} {ended} {time.monotonic()}\n")
            step += 1


def work(args: Namespace) -> None:
    """In a process group: prepare, and train."""
    torch.set_num_threads(1)
    embedding = torch.nn.Embedding.from_pretrained(torch.ones(ROWS, WIDTH))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(embedding, torch.nn.Linear(WIDTH, OUTPUTS)))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    objects = {"model": model, "optimizer": optimizer}
    if is_launched():
        elastic(train)(State(**objects), args, model, optimizer)
    else:
        train(Saved(SAVE_EVERY, **objects), args, model, optimizer)


if __name__ == "__main__":
    arguments = unchanged.argument_parser().parse_args()
    dist.init_process_group("gloo")
    work(arguments)
