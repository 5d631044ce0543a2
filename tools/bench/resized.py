"""What the bench of planned changes runs: a DDP model and 100 MB of `State`, while nodes join and leave.

`resized.py FOLDER [--anew]`: each rank appends to FOLDER/note.ATTEMPT.RANK when it enters its function, has restored,
and has done a step, with the time (CLOCK_MONOTONIC). `--anew`: without `elastic`.

Under torchrun, for which `State` does nothing, rank 0 writes what `State` would hold to /dev/shm each 20 steps.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from unchanged_elastic import SAVE_EVERY, Tables

from raylaunch import worker


def train(state: worker.State, folder: Path, objects: dict[str, torch.nn.Module]) -> None:
    """Train until the folder says that it is enough."""
    launched, world, rank = worker.context().launched, os.environ["WORLD_SIZE"], os.environ["RANK"]
    attempt = os.environ["RAYLAUNCH_ATTEMPT"] if launched else world
    file = Path(f"/dev/shm/{folder.name}.pt")
    with (folder / f"note.{attempt}.{rank}").open("a", buffering=1) as notes:

        def note(what: object) -> None:
            notes.write(f"{attempt} {rank} {world} {what} {time.monotonic()}\n")

        note("entered")
        done = state.restore()
        if not launched and file.exists():
            found = torch.load(file)
            done = found.pop("done")
            for name, one in found.items():
                objects[name].load_state_dict(one)
        note("restored")
        model, optimizer = objects["model"], objects["optimizer"]
        is_over = torch.zeros(1)
        while not is_over:
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            is_over[0] = (folder / "enough").exists()
            dist.all_reduce(is_over)
            note(done)
            state.commit(done)
            done += 1
            if not launched and rank == "0" and done % SAVE_EVERY == 0:
                torch.save({"done": done} | {name: one.state_dict() for name, one in objects.items()}, f"{file}.new")
                os.replace(f"{file}.new", file)
            time.sleep(0.02)
    file.unlink(missing_ok=True)


def main() -> None:
    """As torchrun and raylaunch start it."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)))
    objects = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "tables": Tables()}
    call = train if "--anew" in sys.argv else worker.elastic(train)
    call(worker.State(**objects), folder, objects)
    dist.destroy_process_group()


main()
