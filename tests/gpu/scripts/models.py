"""Train a model with DDP and one with FSDP2; the loss must fall, and parameters be equal on all ranks."""

from __future__ import annotations

import sys

import rank
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
GLOO = "gloo" in sys.argv  # DDP with several ranks on one GPU
device = rank.context(0 if GLOO else rank.LOCAL_RANK)
dist.init_process_group("gloo" if GLOO else rank.BACKEND)


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)


def train(name: str, wrapped: nn.Module) -> None:
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(rank.RANK)
    data = torch.randn(128, 64, device=device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (wrapped(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    rank.note(name, first=losses[0], last=losses[-1])


ids = None if rank.SIMULATED else [device.index]
ddp = DistributedDataParallel(model(), device_ids=ids)
train("ddp", ddp)
mine = torch.cat([one.detach().flatten() for one in ddp.parameters()])
greatest = mine.clone()
dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
assert torch.equal(mine, greatest), "parameters differ between ranks"
if not GLOO:
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh(device.type, (rank.WORLD_SIZE,)))
    train("fsdp2", sharded)
dist.destroy_process_group()
