"""Train some steps, then hang in the first attempt: `hangs.py kernel` or `hangs.py collective`.

In a kernel: rank 0 waits for one that does not end. In a collective: rank 0 does not join it. A single rank, which
cannot wait for others, waits in the call of the collective for a kernel before it that does not end. The collective is
a barrier: since torch 2.8 it is the only one with NCCL whose call waits.
"""

from __future__ import annotations

import sys
import time

import rank
import torch
import torch.distributed as dist

NEVER = 10**12
"""Cycles: minutes."""
kind = sys.argv[1]
device = rank.context()
dist.init_process_group(rank.BACKEND)
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def spin() -> None:
    """Start a kernel that does not end."""
    if not rank.SIMULATED:
        torch.cuda._sleep(NEVER)  # noqa: SLF001


def wait_for_the_kernel() -> None:
    if rank.SIMULATED:
        time.sleep(1000)
    torch.cuda.synchronize()


def step() -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=device)).sum().backward()
    optimizer.step()


for number in range(20):
    step()
    dist.barrier()
    if rank.ATTEMPT == 1 and number == 10:
        rank.note("hangs")
        if kind == "kernel" and rank.RANK == 0:
            spin()
            wait_for_the_kernel()
        elif kind == "collective" and rank.WORLD_SIZE == 1:
            spin()
            dist.barrier()
            wait_for_the_kernel()
        elif kind == "collective" and rank.RANK > 0:
            dist.barrier()
        elif kind == "collective":
            time.sleep(1000)
rank.note("done")
dist.destroy_process_group()
