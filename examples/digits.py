"""DistributedDataParallel on scikit-learn's handwritten digits: a whole script that loses no step.

raylaunch --nproc-per-node 2 --max-restarts 3 examples/digits.py
RAYLAUNCH_DURABLE=durable torchrun --nproc-per-node 2 --max-restarts 3 examples/digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raylaunch.worker import State

STEPS, BATCH = 400, 32


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # dropout and samples of each rank's own

    state = State(every=1, model=model, optimizer=optimizer)  # by default as often as costs 2 % of the time
    done = state.restore()
    if rank == 0:
        print(f"resuming after step {done}" if done else "starting from scratch", flush=True)
    for step in range(done, STEPS):
        mine = torch.randint(1500, (BATCH,))
        loss = cross_entropy(model(images[train][mine]), labels[train][mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.commit(step)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.3f}", flush=True)
    state.finish()

    net.eval()
    with torch.no_grad():
        logits = net(images[test])
    accuracy = (logits.argmax(1) == labels[test]).float().mean().item()
    if rank == 0:
        print(f"{world_size} ranks, accuracy {accuracy:.3f}")
        print(f"final loss {cross_entropy(logits, labels[test]).item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
