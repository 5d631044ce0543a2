"""Train a model with `elastic`, kill the last rank, and go on: `survives.py DistributedDataParallel` or `fully_shard`.

With a GPU for each rank the backend is nccl, else gloo, with all ranks on one GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import rank
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raylaunch.worker import State, elastic

STEPS, AT, WIDTH = 12, 6, 64 if rank.SIMULATED else 4096
GPUS = 0 if rank.SIMULATED else torch.cuda.device_count()
BACKEND = "nccl" if GPUS >= rank.WORLD_SIZE else "gloo"
device = rank.context(rank.LOCAL_RANK % max(1, GPUS))


@elastic(backend=BACKEND)
def train() -> list[float]:
    attempt = int(os.environ["RAYLAUNCH_ATTEMPT"])  # a worker that stays has another one than it began with
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).to(device)
    if sys.argv[1] == "fully_shard":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = State(model=model, optimizer=optimizer, every=1)
    done = state.restore()
    rank.note("began" if attempt == 1 else "again", steps=done, backend=BACKEND)
    for step in range(done, STEPS):
        if attempt == 1 and step == AT and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1)  # the others come to the collective
            rank.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        state.commit(step)
    state.finish()
    sums = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return [float(one.detach().double().abs().sum()) for one in sums]


rank.note("ended", sums=train())
