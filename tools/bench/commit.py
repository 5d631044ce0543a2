"""A commit of `State`, 100 MB of one rank, beside a plain copy of the same bytes into memory that is there already.

With DistributedDataParallel (DDP) the ranks of a node divide what is equal on all ranks. There, four ranks commit 100 MB
of parameters at the same time, and then copy them at the same time.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, processes
from tools.bench.contenders import RAYLAUNCH
from tools.bench.figures import Figure, Outcome

COPY = "copy"
_ROUNDS = 5
_SCRIPT = """
import json, time, torch
from raylaunch.worker import State

TENSORS, COMMITS, WARM = 25, 24, 4

class Holds:
    tensors = [torch.rand(1_000_000) for _ in range(TENSORS)]
    def state_dict(self): return dict(enumerate(self.tensors))
    def load_state_dict(self, state): pass

torch.set_num_threads(1)
holds, times = Holds(), {"raylaunch": [], "copy": []}
state = State(holds=holds, every=1)
copies = [[torch.empty_like(one) for one in holds.tensors] for _ in range(2)]
for step in range(COMMITS):
    began = time.perf_counter()
    state.commit(step)
    middle = time.perf_counter()
    for target, source in zip(copies[step % 2], holds.tensors):
        target.copy_(source)
    ended = time.perf_counter()
    if step >= WARM:
        times["raylaunch"].append(middle - began)
        times["copy"].append(ended - middle)
print(json.dumps(times))
"""

_DDP_SCRIPT = """
import json, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State

COMMITS, WARM = 16, 4

torch.set_num_threads(1)
dist.init_process_group("gloo")
frozen = [torch.nn.Embedding.from_pretrained(torch.rand(1000, 1000)) for _ in range(25)]
model = DistributedDataParallel(torch.nn.ModuleList([*frozen, torch.nn.Linear(8, 8)]))
times = {"raylaunch": [], "copy": []}
state = State(model=model, every=1, random_state=False)
copies = [[torch.empty_like(one) for one in model.parameters()] for _ in range(2)]
for step in range(COMMITS):
    dist.barrier()
    began = time.perf_counter()
    state.commit(step)
    dist.barrier()
    middle = time.perf_counter()
    with torch.no_grad():
        for target, source in zip(copies[step % 2], model.parameters()):
            target.copy_(source)
    dist.barrier()
    ended = time.perf_counter()
    if step >= WARM:
        times["raylaunch"].append(middle - began)
        times["copy"].append(ended - middle)
if dist.get_rank() == 0:
    print(json.dumps(times))
"""


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Several runs on this machine, without the cluster: copies and commits take turns in each."""
    del cluster
    one = _times(scratch, "commit", _SCRIPT, ["preload=[torch]"])
    many = _times(scratch, "commit-ddp", _DDP_SCRIPT, ["preload=[torch,torch._dynamo]", "nproc_per_node=4"])
    parts = (
        ("commit of 100 MB", (__doc__ or "").split("\n", 1)[0], one, figures.ratio(1.3, COPY)),
        (
            "commit of 100 MB with DDP",
            "The same with DDP on each of four ranks of a node, all at the same time.",
            many,
            figures.ratio(0.8, COPY),
        ),
    )
    found = [
        Figure(name=name, what=what, unit="s", samples={who: tuple(each) for who, each in times.items()}, goals=(goal,))
        for name, what, times, goal in parts
    ]
    return Outcome(figures=tuple(found), more={"times": one, "times with DDP": many})


def _times(scratch: Path, name: str, script: str, settings: list[str]) -> dict[str, list[float]]:
    """Run a script several times; return the seconds that it has printed, by contender."""
    found: dict[str, list[float]] = {RAYLAUNCH: [], COPY: []}
    for number in range(_ROUNDS):
        folder = scratch / f"{name}-{number}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        command = [sys.executable, "-m", "raylaunch", "--log-dir", "/dev/null", "--show", "raw"]
        done = subprocess.run(
            [*command, *(word for each in ("ray.address=none", *settings) for word in ("--set", each)), "train.py"],
            cwd=folder,
            env=processes.environment(secrets.token_hex(8), {}),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        times = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        for who, each in ((RAYLAUNCH, times["raylaunch"]), (COPY, times["copy"])):
            found[who] += each
    return found
