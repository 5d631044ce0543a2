"""Checkpoints of 100 MB that the node writes to disk: MB per second, and what it costs the steps of training meanwhile."""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, processes
from tools.bench.contenders import RAYLAUNCH
from tools.bench.figures import Figure, Outcome

_SECONDS = 60.0
_EVERY = 6.0
_SCRIPT = """
import json, os, sys, time, torch
from raylaunch.worker import State

SECONDS, FOLDER = float(sys.argv[1]), sys.argv[2]

torch.set_num_threads(1)
model = torch.nn.Linear(5000, 5000, bias=False)
state, inputs = State(model=model, every=20), torch.rand(300, 300)
steps, written, step, began, since, bytes_ = [], [], 0, time.perf_counter(), 0.0, 0
while time.perf_counter() - began < SECONDS:
    before = time.perf_counter()
    for _ in range(12):
        inputs @ inputs
    took = time.perf_counter() - before
    state.commit(step)
    step += 1
    names = os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
    is_writing = any("incomplete" in name for name in names)
    steps.append((took, bool(since)))
    if is_writing and not since:
        since = before
    if since and not is_writing:
        written.append(time.perf_counter() - since)
        since = 0.0
print(json.dumps({"steps": steps, "written": written, "bytes": 4 * model.weight.numel()}))
"""


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """One run on this machine, without the cluster."""
    del cluster
    folder = scratch / "durable-write"
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "raylaunch", "--log-dir", "/dev/null", "--show", "raw"]
    settings = ["ray.address=none", "preload=[torch]", "durable=checkpoints", f"durable_every={_EVERY}"]
    done = subprocess.run(
        [
            *command,
            *(word for setting in settings for word in ("--set", setting)),
            "train.py",
            str(_SECONDS),
            str(folder / "checkpoints"),
        ],
        cwd=folder,
        env=processes.environment(secrets.token_hex(8), {}),
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    busy, idle = ([took for took, is_writing in found["steps"] if is_writing is which] for which in (True, False))
    speed = Figure(
        name="durable: MB per second",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="MB/s",
        samples={RAYLAUNCH: tuple(found["bytes"] / 1e6 / seconds for seconds in found["written"])},
        more_is_better=True,
    )
    share = len(busy) / len(found["steps"])
    cost = share * (statistics.fmean(busy) / statistics.fmean(idle) - 1) if busy else 0.0
    slower = Figure(
        name="durable: cost to the step",
        what=f"how much longer a step takes, with a checkpoint each {_EVERY:g} s: a share of its time",
        unit="of the time",
        samples={RAYLAUNCH: (max(0.0, cost),)},
        goals=(figures.median_at_most(0.02),),
    )
    more = {"busy": statistics.fmean(busy) if busy else 0.0, "idle": statistics.fmean(idle), "share": share}
    return Outcome(figures=(speed, slower), more={"times": more})
