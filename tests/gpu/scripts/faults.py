"""Fail in one way after the other, one in each attempt, and do well in the last: `faults.py FAULT@PLACE ...`.

Faults are kill, segv, oom and illegal (a kernel that accesses memory which is not its own; the context is of no use
afterwards). Places are context (right after the CUDA context is there), group (after `init_process_group`) and step (in
a loop of all_reduces). Rank 0 fails. Each attempt takes most of the GPU's memory, so the next one cannot have it unless
it is free again.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import rank
import torch
import torch.distributed as dist

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a process with CUDA has gigabytes
ILLEGAL = "CUDA error: an illegal memory access was encountered"
PLAN = [word.split("@") for word in sys.argv[1:]]
fault, place = PLAN[rank.ATTEMPT - 1] if len(PLAN) >= rank.ATTEMPT else ("", "")


def fail() -> None:
    """Never returns, unless the fault was none."""
    rank.note("fault", fault=fault)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "oom":
        if rank.SIMULATED:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    if fault == "illegal":
        if rank.SIMULATED:
            raise RuntimeError(ILLEGAL)
        access_freed_memory()


def access_freed_memory() -> None:
    """Write to address 0; should torch notice, read behind the end of a tensor, which is an assertion on the device."""
    freed = torch.ones(1 << 20, device="cuda")
    freed.untyped_storage().resize_(0)
    try:
        freed.add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise
    print(torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")])


device = rank.context()
free = rank.free_bytes()
rank.note("context", free=free)
if rank.RANK == 0 and place == "context":
    fail()
dist.init_process_group(rank.BACKEND, device_id=None if rank.SIMULATED else device)
ballast = torch.ones(int(0.8 * free) // rank.SCALE, dtype=torch.uint8, device=device)
total = torch.ones(1 << 16, device=device)
dist.all_reduce(total)
rank.synchronize()
rank.note("reduced", free=free)
if rank.RANK == 0 and place == "group":
    fail()
for step in range(30):
    dist.all_reduce(total)
    rank.synchronize()
    if rank.RANK == 0 and place == "step" and step == 10:
        fail()
dist.barrier()
dist.destroy_process_group()
