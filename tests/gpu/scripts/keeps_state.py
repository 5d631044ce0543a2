"""Commit tensors on the device with `State`, kill a rank, and restore: `keeps_state.py BYTES STEPS [NAME ...]`.

The first attempt notes what a step takes without and with a commit of so many bytes, and what a plain copy into pinned
memory takes. Then the state grows by a tensor for each name, so that its buffers are made anew. The second attempt notes what the restoring takes, and whether the tensors are what was committed.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import sys
import time
from typing import Any

import rank
import torch
import torch.distributed as dist

from raylaunch.worker import State

BYTES, STEPS = int(float(sys.argv[1])) // rank.SCALE, int(sys.argv[2])
COUNT = 10
device = rank.context()
dist.init_process_group(rank.BACKEND)


class Holds:
    """Tensors of BYTES in all."""

    def __init__(self) -> None:
        self.tensors = {str(index): torch.zeros(BYTES // COUNT // 4, device=device) for index in range(COUNT)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state

    def set_to(self, step: int) -> None:
        for index, tensor in enumerate(self.tensors.values()):
            tensor.fill_(step + index)

    def is_of(self, step: int) -> bool:
        return all(bool((tensor == step + index).all()) for index, tensor in enumerate(self.tensors.values()))


def work() -> None:
    """What stands for a step: a tenth of a second of matrix products."""
    left = torch.ones(256 if rank.SIMULATED else 8192, 256 if rank.SIMULATED else 8192, device=device)
    for _ in range(10 if rank.SIMULATED else 3):
        left = (left @ left).clamp(0, 1)
    rank.synchronize()


def copy_to(pinned: torch.Tensor, source: torch.Tensor) -> None:
    """What a commit cannot do faster."""
    pinned.copy_(source, non_blocking=True)


def timed(call: Any) -> float:
    rank.synchronize()
    began = time.perf_counter()
    call()
    rank.synchronize()
    return time.perf_counter() - began


if rank.ATTEMPT > 1:
    rank.note("again")
holds = Holds()
began = time.perf_counter()
state = State(holds=holds, every=1)
done = state.restore()
restoring = time.perf_counter() - began
if rank.ATTEMPT > 1:
    rank.synchronize()
    rank.note("restored", seconds=restoring, steps=done, right=holds.is_of(done - 1))
    dist.destroy_process_group()
    sys.exit()
work()
plain, calls, steps = [], [], []
for step in range(STEPS):  # steps without and with a commit take turns
    plain.append(timed(work))
    holds.set_to(step)
    rank.synchronize()
    began = time.perf_counter()
    state.commit(step)
    calls.append(time.perf_counter() - began)
    work()
    steps.append(time.perf_counter() - began)
source = next(iter(holds.tensors.values()))
call = functools.partial(copy_to, torch.empty(source.shape, pin_memory=not rank.SIMULATED), source)
copy = COUNT * statistics.median(timed(call) for _ in range(3))
for name in sys.argv[3:]:  # the buffers are made anew, where the old ones were
    STEPS += 1
    holds.tensors[name] = torch.zeros(BYTES // 20, device=device)
    holds.set_to(STEPS - 1)
    state.commit(STEPS - 1)
    work()
holds.set_to(STEPS)
state.commit(STEPS)
work()
rank.synchronize()
rank.note(
    "committed",
    steps=STEPS + 1,
    step_seconds=statistics.median(plain[2:]),
    call_seconds=statistics.median(calls[2:]),
    with_commit_seconds=statistics.median(steps[2:]),
    first_commit_seconds=steps[0],
    pinned_copy_seconds=copy,
)
time.sleep(0.5)
holds.set_to(STEPS + 1)
state.commit(STEPS + 1)  # seals the one before
dist.barrier()
rank.note("killed")
os.kill(os.getpid(), signal.SIGKILL)
