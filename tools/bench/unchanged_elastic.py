"""What the bench of survivors runs: a DDP model and 100 MB of `State`, in a function that is decorated with `elastic`.

The same options and files as `unchanged.py`, and what is passed is the first step after the state was restored.

--anew        without the decorator, so that all workers are started again
--prepare S   what a script prepares before it trains takes so many seconds

Under torchrun, for which `State` does nothing, rank 0 writes what `State` would hold to /dev/shm each 20 steps.
"""

import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
import unchanged  # first of all, for the time of the first line
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raylaunch import worker

MEGABYTES, PARTS, SAVE_EVERY = 100, 25, 20


class Tables(torch.nn.Module):
    """What is not trained: most of the 100 MB."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARTS):
            self.register_buffer(f"table{number}", torch.zeros(MEGABYTES * 250_000 // PARTS))


def train(state: worker.State, args: Namespace, objects: dict[str, torch.nn.Module]) -> None:
    """Restore, pass with the first step, and train until rank 1 dies; after the last death, leave."""
    file = Path(f"/dev/shm/{args.folder.name}.pt")
    joined, rank = time.monotonic(), dist.get_rank()
    died = torch.tensor([len(list(args.folder.glob("death-*"))) if rank == 1 else 0])
    dist.all_reduce(died)
    reduced, generation = time.monotonic(), int(died)
    done = state.restore()
    saves = not worker.context().launched
    if saves and file.exists():
        found = torch.load(file)
        done = found.pop("done")
        for name, one in found.items():
            objects[name].load_state_dict(one)
    model, optimizer, dies_at = objects["model"], objects["optimizer"], None
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        if dies_at is None:
            stations = {
                "entered": unchanged.entered,
                "imported": unchanged.imported,
                "joined": joined,
                "reduced": reduced,
            }
            marks = {**stations, "passed": time.monotonic(), "pid": os.getpid()}
            unchanged.write(args.folder / f"passed-{generation}-{rank}.json", json.dumps(marks))
            dies_at = time.monotonic() + (args.each if generation else args.first)
        state.commit(done)
        done += 1
        if saves and rank == 0 and done % SAVE_EVERY == 0:
            torch.save({"done": done} | {name: one.state_dict() for name, one in objects.items()}, f"{file}.new")
            os.replace(f"{file}.new", file)
        if generation == args.deaths:
            break
        if rank == 1 and time.monotonic() >= dies_at:
            unchanged.write(args.folder / f"death-{generation}", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
    file.unlink(missing_ok=True)


def main() -> None:
    """As torchrun and raylaunch start it."""
    parser = unchanged.argument_parser()
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--prepare", type=float, default=0.0)
    args = parser.parse_args(sys.argv[1:])
    call = train if args.anew else worker.elastic(train)
    time.sleep(args.prepare)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)))
    objects = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "tables": Tables()}
    call(worker.State(every=1, **objects), args, objects)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
