"""What scripts of the benches save where there is no `State`: under torchrun and Ray Train, checkpoints in tmpfs."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def is_launched() -> bool:
    """Return whether raylaunch has started this worker."""
    return "RAYLAUNCH_ATTEMPT" in os.environ


class Saved:
    """Has the methods of `State` that the scripts use. Rank 0 writes, with `torch.save`, and all ranks read."""

    def __init__(self, every: int, **objects: Any) -> None:
        """`every`: the steps between two checkpoints."""
        self._every = every
        self._objects = objects
        self._path = Path(os.environ["BENCH_TMPFS"]) / "state.pt"

    def restore(self) -> int:
        """Return the number of steps that were done."""
        if not self._path.exists():
            return 0
        found = torch.load(self._path)
        done = int(found.pop("done"))
        for name, state in found.items():
            self._objects[name].load_state_dict(state)
        return done

    def commit(self, step: int) -> None:
        """Write a checkpoint, if it is time."""
        if dist.get_rank() == 0 and (step + 1) % self._every == 0:
            states = {name: one.state_dict() for name, one in self._objects.items()}
            torch.save({"done": step + 1, **states}, f"{self._path}.tmp")
            os.replace(f"{self._path}.tmp", self._path)
