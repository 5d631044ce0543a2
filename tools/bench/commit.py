"""What `State` costs a script: three measurements on this machine, without a cluster.

commit         a commit, 100 MB of one rank, beside a plain copy of the same bytes into memory that is there already.
               With DistributedDataParallel (DDP) the ranks of a node divide what is equal on all ranks. There, four ranks
               commit 100 MB of parameters at the same time, and then copy them at the same time. Copies and commits take
               turns
commit-auto    the share of the time that commits take with `every="auto"`, 100 MB of one rank, at steps of 20 and of 200 ms
durable-write  checkpoints of 100 MB that the node writes to disk: MB per second, and what they cost the steps meanwhile
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.private_cluster import Cluster
from tools.bench import figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, new_folder
from tools.bench.figures import Bench, Figure, Outcome

COPY = "copy"
_SCRIPT = """
import json, os, sys, time, torch
import torch.distributed as dist
from raylaunch.worker import State

class Holds:
    tensors = [torch.rand(1_000_000) for _ in range(25)]
    def state_dict(self): return dict(enumerate(self.tensors))
    def load_state_dict(self, state): pass

torch.set_num_threads(1)
"""
_TURNS = '''
def in_turn(state, tensors, commits, together=lambda: None):
    """Commit, and copy, and print the seconds of each but for the first ones."""
    times = {"raylaunch": [], "copy": []}
    copies = [[torch.empty_like(one) for one in tensors] for _ in range(2)]
    for step in range(4 + commits):
        together()
        began = time.perf_counter()
        state.commit(step)
        together()
        middle = time.perf_counter()
        with torch.no_grad():
            for target, source in zip(copies[step % 2], tensors):
                target.copy_(source)
        together()
        ended = time.perf_counter()
        if step >= 4:
            times["raylaunch"].append(middle - began)
            times["copy"].append(ended - middle)
    if os.environ["RANK"] == "0":
        print(json.dumps(times))
'''
_ALONE = f"""{_SCRIPT}{_TURNS}
holds = Holds()
in_turn(State(holds=holds, every=1), holds.tensors, int(sys.argv[1]))
"""
_WITH_DDP = f"""{_SCRIPT}{_TURNS}
dist.init_process_group("gloo")
frozen = [torch.nn.Embedding.from_pretrained(torch.rand(1000, 1000)) for _ in range(25)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([*frozen, torch.nn.Linear(8, 8)]))
state = State(model=model, every=1, random_state=False)
in_turn(state, [*model.parameters()], int(sys.argv[1]), dist.barrier)
"""
_AUTO = f"""{_SCRIPT}
STEP, MEASURED, WARM = map(float, sys.argv[1:])
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
_DURABLE = f"""{_SCRIPT}
SECONDS, FOLDER = float(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(5000, 5000, bias=False)
state, inputs = State(model=model, every=20), torch.rand(300, 300)
steps, written, step, began, since = [], [], 0, time.perf_counter(), 0.0
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
print(json.dumps({{"steps": steps, "written": written, "bytes": 4 * model.weight.numel()}}))
"""


def _printed(scratch: Path, script: str, *args: object, **settings: object) -> Any:
    """Run a script, and return what it printed as JSON. `args` may name what is in its folder."""
    folder = new_folder(scratch, "commit")
    (folder / "train.py").write_text(script)
    words = [f"{name}={json.dumps(value)}" for name, value in {"ray.address": "none", **settings}.items()]
    done = subprocess.run(
        [
            *(*launches.COMMAND, "--log-dir", "/dev/null", "--show", "raw"),
            *(word for each in words for word in ("--set", each)),
            *("train.py", *map(str, args)),
        ],
        cwd=folder,
        env=processes.environment(secrets.token_hex(8), {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    if done.returncode:
        raise processes.BenchError(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line[:1] in "{0123456789"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSize:
    rounds: int = 5
    commits: int = 20
    commits_with_ddp: int = 12
    workers: int = 4


def _commit(_: Cluster, scratch: Path, size: CommitSize) -> Outcome:
    """Several runs of each script."""
    one: dict[str, list[float]] = {RAYLAUNCH: [], COPY: []}
    many: dict[str, list[float]] = {RAYLAUNCH: [], COPY: []}
    torch, compiler = ["torch"], ["torch", "torch._dynamo"]
    for _round in range(size.rounds):
        found = _printed(scratch, _ALONE, size.commits, preload=torch)
        for_all = _printed(scratch, _WITH_DDP, size.commits_with_ddp, preload=compiler, nproc_per_node=size.workers)
        for name in one:
            one[name] += found[name]
            many[name] += for_all[name]
    beside = "A commit of `State`, 100 MB of one rank, beside a plain copy of the same bytes into memory that is there already."
    together = "The same with DDP on each of four ranks of a node, all at the same time."
    parts = (
        ("commit of 100 MB", beside, one, figures.ratio(1.3, COPY)),
        ("commit of 100 MB with DDP", together, many, figures.ratio(0.8, COPY)),
    )
    shown = [
        Figure(name=name, what=what, unit="s", samples={who: tuple(each) for who, each in times.items()}, goals=(goal,))
        for name, what, times, goal in parts
    ]
    return Outcome(figures=tuple(shown), more={"times": one, "times with DDP": many})


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSize:
    """All in seconds."""

    steps: tuple[float, ...] = (0.02, 0.2)
    measured: float = 20.0
    warm: float = 5.0


def _commit_auto(_: Cluster, scratch: Path, size: AutoSize) -> Outcome:
    """One run for each length of a step."""
    found = {step: _printed(scratch, _AUTO, step, size.measured, size.warm, preload=["torch"]) for step in size.steps}
    return Outcome(
        figures=tuple(
            Figure(
                name=f"commits, steps of {1000 * step:.0f} ms",
                what='The share of the time that commits take with `every="auto"`, 100 MB of one rank.',
                unit="of the time",
                samples={RAYLAUNCH: (share,)},
                goals=(figures.median_at_most(0.02),),
            )
            for step, share in found.items()
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableSize:
    """All in seconds."""

    measured: float = 60.0
    every: float = 6.0


def _durable_write(_: Cluster, scratch: Path, size: DurableSize) -> Outcome:
    """One run."""
    settings = {"preload": ["torch"], "durable": "checkpoints", "durable_every": size.every}
    found = _printed(scratch, _DURABLE, size.measured, "checkpoints", **settings)
    busy, idle = ([took for took, is_writing in found["steps"] if is_writing is which] for which in (True, False))
    speed = Figure(
        name="durable: MB per second",
        what="Checkpoints of 100 MB that the node writes to disk.",
        unit="MB/s",
        samples={RAYLAUNCH: tuple(found["bytes"] / 1e6 / seconds for seconds in found["written"])},
        more_is_better=True,
    )
    share = len(busy) / len(found["steps"])
    cost = share * (statistics.fmean(busy) / statistics.fmean(idle) - 1) if busy else 0.0
    slower = Figure(
        name="durable: cost to the step",
        what=f"how much longer a step takes, with a checkpoint each {size.every:g} s: a share of its time",
        unit="of the time",
        samples={RAYLAUNCH: (max(0.0, cost),)},
        goals=(figures.median_at_most(0.02),),
    )
    more = {"busy": statistics.fmean(busy) if busy else 0.0, "idle": statistics.fmean(idle), "share": share}
    return Outcome(figures=(speed, slower), more={"times": more})


BENCHES: dict[str, Bench[Any]] = {
    "commit": Bench(
        measure=_commit,
        full=CommitSize(),
        smoke=CommitSize(rounds=1, commits=2, commits_with_ddp=2, workers=2),
        needs_cluster=False,
    ),
    "commit-auto": Bench(
        measure=_commit_auto,
        full=AutoSize(),
        smoke=AutoSize(steps=(0.02,), measured=0.5, warm=0.5),
        needs_cluster=False,
    ),
    "durable-write": Bench(
        measure=_durable_write,
        full=DurableSize(),
        smoke=DurableSize(measured=8.0, every=0.5),
        needs_cluster=False,
    ),
}
