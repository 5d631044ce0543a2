"""A script that keeps its state in `State`, and writes each step with the time and the world's size.

Arguments: the file for that, the number of steps.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from raylaunch.worker import State

path, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
total = torch.zeros(1)
holder = torch.nn.Linear(1, 1)
state = State(model=holder)
for step in range(state.restore(), steps):
    dist.all_reduce(total)
    time.sleep(0.05)
    if dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(f"{step} {dist.get_world_size()} {time.time()} {os.environ['TORCHELASTIC_RUN_ID']}\n")
    state.commit(step)
state.finish()
dist.destroy_process_group()
