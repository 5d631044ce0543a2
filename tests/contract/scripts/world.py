"""Write what a worker sees and what the ranks can do together. Arguments: what to try with torch, `env`, `tcp` and `rpc`."""

import json
import os
import socket
import sys

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def with_torch():
    """Only if it is asked for: importing torch takes seconds."""
    import torch.distributed as dist

    return {
        "launched": dist.is_torchelastic_launched(),
        "sum": rank_sum(dist),
        "doubled": call_the_next() if "rpc" in sys.argv else None,
    }


def rank_sum(dist):
    import torch

    where = f"tcp://localhost:{os.environ['MASTER_PORT']}" if "tcp" in sys.argv else "env://"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def doubled(number):
    return 2 * number


def call_the_next():
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    answer = rpc.rpc_sync(f"worker{(rank + 1) % size}", doubled, (rank,))
    rpc.shutdown()
    return answer


for fruit in ("apple", "pear, green", "plum"):
    print(f"{fruit} out of {rank}")
    print(f"{fruit} err of {rank}", file=sys.stderr)

answer = {"env": dict(os.environ), "argv": sys.argv, "name": __name__, "cwd": os.getcwd()}
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()  # somebody listens there
if {"env", "tcp"} & set(sys.argv):
    answer |= with_torch()
with open(f"{rank}.json", "w") as file:
    json.dump(answer, file)
