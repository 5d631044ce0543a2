"""A commit of `State`, 100 MB of one rank, beside a plain copy of the same bytes into memory that is there already."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

from tests.bench import figures, processes
from tests.bench.contenders import RAYLAUNCH
from tests.bench.figures import Figure, Outcome
from tests.private_cluster import Cluster

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


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Several runs on this machine, without the cluster: copies and commits take turns in each."""
    del cluster
    found: dict[str, list[float]] = {RAYLAUNCH: [], COPY: []}
    for number in range(_ROUNDS):
        folder = scratch / f"commit-{number}"
        folder.mkdir()
        (folder / "train.py").write_text(_SCRIPT)
        command = [sys.executable, "-m", "raylaunch", "--log-dir", "/dev/null", "--show", "raw"]
        done = subprocess.run(
            [*command, "--set", "ray.address=none", "--set", "preload=[torch]", "train.py"],
            cwd=folder,
            env=processes.environment(secrets.token_hex(8), {}),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        times = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        for name, each in ((RAYLAUNCH, times["raylaunch"]), (COPY, times["copy"])):
            found[name] += each
    figure = Figure(
        name="commit of 100 MB",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: tuple(each) for name, each in found.items()},
        goals=(figures.ratio(1.3, COPY),),
    )
    return Outcome(figures=(figure,), more={"times": found})
