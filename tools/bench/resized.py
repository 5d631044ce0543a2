"""What the bench of planned changes runs: a DDP model and 100 MB of `State`, while nodes join and leave.

`resized.py FOLDER [--anew]`: each rank appends to FOLDER/note.ATTEMPT.RANK when it enters its function, has restored,
and has done a step, with the time (CLOCK_MONOTONIC). `--anew`: without `elastic`.

Under torchrun rank 0 writes what `State` would hold to tmpfs each 20 steps.
"""

import os
import sys
import time
from pathlib import Path

import torch
from saved import Saved, is_launched
from torch import distributed as dist
from unchanged_elastic import do_step, objects_of_state, state_of

from raylaunch import worker


def train(state: worker.State | Saved, folder: Path, objects: dict[str, torch.nn.Module]) -> None:
    """Train until the folder says that it is enough."""
    world, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    attempt = os.environ["RAYLAUNCH_ATTEMPT"] if is_launched() else world
    with (folder / f"note.{attempt}.{rank}").open("a", buffering=1) as notes:

        def note(what: object) -> None:
            notes.write(f"{attempt} {rank} {world} {what} {time.monotonic()}\n")

        note("entered")
        done = state.restore()
        note("restored")
        is_over = torch.zeros(1)
        while not is_over:
            do_step(objects)
            is_over[0] = (folder / "enough").exists()
            dist.all_reduce(is_over)
            note(done)
            state.commit(done)
            done += 1
            time.sleep(0.02)


def main() -> None:
    """As torchrun and raylaunch start it."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    objects = objects_of_state()
    call = worker.elastic(train) if is_launched() and "--anew" not in sys.argv else train
    call(state_of(objects), folder, objects)
    dist.destroy_process_group()


main()
