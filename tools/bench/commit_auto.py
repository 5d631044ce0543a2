"""The share of the time that commits take with `every="auto"`, 100 MB of one rank, at steps of 20 ms and of 200 ms."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, processes
from tools.bench.contenders import RAYLAUNCH
from tools.bench.figures import Figure, Outcome

_STEP_SECONDS = (0.02, 0.2)
_MEASURED_SECONDS = 20.0
_SCRIPT = """
import json, sys, time, torch
from raylaunch.worker import State

STEP, MEASURED, WARM = float(sys.argv[1]), float(sys.argv[2]), 5.0

class Holds:
    tensors = [torch.rand(1_000_000) for _ in range(25)]
    def state_dict(self): return dict(enumerate(self.tensors))
    def load_state_dict(self, state): pass

torch.set_num_threads(1)
state, inputs = State(holds=Holds()), torch.rand(200, 200)
step, spent, began = 0, 0.0, time.perf_counter()
while time.perf_counter() - began < WARM + MEASURED:
    ends = time.perf_counter() + STEP
    while time.perf_counter() < ends:
        inputs @ inputs
    before = time.perf_counter()
    state.commit(step)
    if before - began > WARM:
        spent += time.perf_counter() - before
    step += 1
print(json.dumps(spent / (time.perf_counter() - began - WARM)))
"""


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """One run for each length, on this machine, without the cluster."""
    del cluster
    found = []
    for seconds in _STEP_SECONDS:
        folder = scratch / f"commit-auto-{seconds}"
        folder.mkdir()
        (folder / "train.py").write_text(_SCRIPT)
        command = [sys.executable, "-m", "raylaunch", "--log-dir", "/dev/null", "--show", "raw"]
        done = subprocess.run(
            [
                *command,
                "--set",
                "ray.address=none",
                "--set",
                "preload=[torch]",
                "train.py",
                str(seconds),
                str(_MEASURED_SECONDS),
            ],
            cwd=folder,
            env=processes.environment(secrets.token_hex(8), {}),
            capture_output=True,
            text=True,
            check=True,
            timeout=180,
        )
        share = float(done.stdout.splitlines()[-1])
        found.append(
            Figure(
                name=f"commits, steps of {1000 * seconds:.0f} ms",
                what=(__doc__ or "").split("\n", 1)[0],
                unit="of the time",
                samples={RAYLAUNCH: (share,)},
                goals=(figures.median_at_most(0.02),),
            )
        )
    return Outcome(figures=tuple(found))
