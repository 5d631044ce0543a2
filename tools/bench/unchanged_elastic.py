"""What the bench of survivors runs: a DDP model and 100 MB of `State`, in a function that is decorated with `elastic`.

The same options and files as `unchanged.py`, and what is passed is the first step after the state was restored.

--anew        without the decorator, so that all workers are started again
--prepare S   what a script prepares before it trains takes this many seconds

Under torchrun rank 0 writes what `State` would hold to tmpfs each 20 steps.
"""

import sys
import time
from argparse import Namespace

import torch
import unchanged  # first of all, for the time of the first line
from saved import Saved, is_launched
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


def objects_of_state() -> dict[str, torch.nn.Module]:
    """A model with DDP, its optimizer, and what is not trained. There is a process group."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "tables": Tables()}


def do_step(objects: dict[str, torch.nn.Module]) -> None:
    """Train for one step."""
    objects["optimizer"].zero_grad()
    objects["model"](torch.randn(8, 256)).square().mean().backward()
    objects["optimizer"].step()


def state_of(objects: dict[str, torch.nn.Module], **options: int) -> worker.State | Saved:
    """`State` with these options, or what stands in for it."""
    return worker.State(**options, **objects) if is_launched() else Saved(SAVE_EVERY, **objects)


def train(state: worker.State | Saved, args: Namespace, objects: dict[str, torch.nn.Module]) -> None:
    """Restore, pass with the first step, and train until rank 1 dies; after the last death, leave."""
    joined, rank = time.monotonic(), dist.get_rank()
    died = torch.tensor([len(list(args.folder.glob("death-*"))) if rank == 1 else 0])
    dist.all_reduce(died)
    reduced, generation = time.monotonic(), int(died)
    done, dies_at = state.restore(), None
    while True:
        do_step(objects)
        if dies_at is None:
            unchanged.note_passed(args.folder, generation, joined=joined, reduced=reduced, passed=time.monotonic())
            dies_at = time.monotonic() + (args.each if generation else args.first)
        state.commit(done)
        done += 1
        if generation == args.deaths:
            break
        if rank == 1 and time.monotonic() >= dies_at:
            unchanged.die(args.folder, generation)
        time.sleep(0.02)


def main() -> None:
    """As torchrun and raylaunch start it."""
    parser = unchanged.argument_parser()
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--prepare", type=float, default=0.0)
    args = parser.parse_args(sys.argv[1:])
    call = worker.elastic(train) if is_launched() and not args.anew else train
    time.sleep(args.prepare)
    dist.init_process_group("gloo")
    objects = objects_of_state()
    call(state_of(objects, every=1), args, objects)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
