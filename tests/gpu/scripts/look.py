"""Note which GPUs this rank sees, make a process group, and reduce over it: `look.py [gloo] [shared] [stay]`.

gloo: with gloo, and all ranks on one GPU; shared: also with nccl, which refuses that; stay: until there is a file `leave`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rank
import torch
import torch.distributed as dist

gloo, shared = "gloo" in sys.argv, "shared" in sys.argv
device = rank.context(0 if gloo or shared else rank.LOCAL_RANK)
dist.init_process_group("gloo" if gloo else rank.BACKEND)
total = torch.full((1000,), float(rank.RANK + 1), device=device)
dist.all_reduce(total)
assert total[0] == sum(range(1, rank.WORLD_SIZE + 1)), total[0]
rank.note(
    "look",
    visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    devices=1 if rank.SIMULATED else torch.cuda.device_count(),
    gpu="" if rank.SIMULATED else str(torch.cuda.get_device_properties(device).uuid),
    backend=dist.get_backend(),
    cpus=sorted(os.sched_getaffinity(0)),
)
while "stay" in sys.argv and not Path("leave").exists():
    time.sleep(0.02)
dist.destroy_process_group()
