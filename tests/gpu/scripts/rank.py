"""What the scripts of tests/gpu have in common: the device of a rank, and notes for the test that started it.

Where a GPU is simulated, the device is the CPU, and an open file stands for the CUDA context.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

SIMULATED = os.environ.get("RAYLAUNCH_GPU_SIMULATED", "")
ATTEMPT = int(os.environ.get("RAYLAUNCH_ATTEMPT", "1"))
RANK, LOCAL_RANK = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
BACKEND = "gloo" if SIMULATED else "nccl"
SCALE = 1000 if SIMULATED else 1
"""By how much less memory is used where a GPU is simulated."""
_open: list[Any] = []


def context(index: int = LOCAL_RANK) -> torch.device:
    """Make this rank's device the current one, and a CUDA context on it; return it."""
    if SIMULATED:
        _open.append(open(SIMULATED))  # noqa: SIM115
        return torch.device("cpu")
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")
    return torch.device("cuda", index)


def free_bytes() -> int:
    """Return the free memory of the current device."""
    return 10**9 if SIMULATED else torch.cuda.mem_get_info()[0]


def synchronize() -> None:
    """Wait until the device has done everything."""
    if not SIMULATED:
        torch.cuda.synchronize()


def note(name: str, **facts: Any) -> None:
    """Write facts of this rank in this attempt, with the time (CLOCK_MONOTONIC), whole or not at all."""
    found = {"attempt": ATTEMPT, "rank": RANK, "local_rank": LOCAL_RANK, "pid": os.getpid(), "at": time.monotonic()}
    path = Path(f"{name}-{ATTEMPT}-{RANK}.json")
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(found | facts))
    aside.rename(path)
