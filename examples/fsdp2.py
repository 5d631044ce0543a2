"""FSDP2 with checkpoints of torch.distributed.checkpoint (DCP), which any number of ranks can load.

The script knows nothing of raylaunch but three lines, with which it saves when nodes join or leave. It learns the next
byte of Python's own source.

    raylaunch --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py
"""

import os
import shutil
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from raylaunch.worker import checkpointed, should_checkpoint

STEPS, EVERY, BATCH, CONTEXT, WIDTH = 100, 25, 16, 32, 96
FOLDER = Path("checkpoints")


def build(device: torch.device) -> nn.Module:
    """Return a model that is the same on all ranks, and sharded: each of its layers by itself, then the rest."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model[1:4]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Write a checkpoint, and give it its name when it is complete."""
    unfinished = FOLDER / "unfinished"
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(FOLDER / f"step-{done:06}", ignore_errors=True)
        os.replace(unfinished, FOLDER / f"step-{done:06}")
    dist.barrier()


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one, and return after how many steps it was written."""
    newest = [max(FOLDER.glob("step-*"), default=None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        return 0
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=newest[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(newest[0].name.removeprefix("step-"))


def batch(text: Tensor, step: int) -> Tensor:
    """Return this rank's windows of a step, which depend on nothing but the step's number."""
    begins = torch.randint(
        len(text) - CONTEXT,
        (dist.get_world_size(), BATCH),
        generator=torch.Generator().manual_seed(step),
    )
    return torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins[dist.get_rank()]]).long()


def main() -> None:
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-c]*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = load(model, optimizer)
    if dist.get_rank() == 0:
        print(f"resuming after step {done}" if done else "starting from scratch", flush=True)

    def loss_at(step: int) -> Tensor:
        windows = batch(text, step).to(device)
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    for step in range(done, STEPS):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(model, optimizer, step + 1)
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.3f}", flush=True)
        if should_checkpoint(step):
            save(model, optimizer, step + 1)
            checkpointed(step)

    with torch.no_grad():
        loss = loss_at(STEPS)
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"final loss {loss.item() / dist.get_world_size()!r}")
    dist.barrier()  # meanwhile gloo's threads let go of tensors; they could not while this one waits for their end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
