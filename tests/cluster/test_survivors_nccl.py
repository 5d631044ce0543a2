"""Survivors of scripts with NCCL, with `tests/fake_nccl.py` in its place: what they go on with, and who stays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import fake_nccl
from tests.cluster.test_without_cluster import alone, alone_with_torch, start

__all__ = ["alone", "alone_with_torch"]

pytestmark = pytest.mark.timeout(200)

TRAINS = """
import os, signal, time
import torch
import torch.distributed as dist
import fake_nccl
from raylaunch.worker import State

STEPS, SIZE = 9, 4096
#: In the first attempt: the step, and who does not take part in its collective, since it is dead, or hangs.
AT, DEAD, HUNG = ({at}), ({dead}), ({hung})
fake_nccl.install()
attempt = int(os.environ["RAYLAUNCH_ATTEMPT"])


class Weights:
    def __init__(self):
        self.tensor = fake_nccl.on_device(torch.zeros(SIZE))

    def state_dict(self):
        return {{"tensor": self.tensor}}

    def load_state_dict(self, state):
        torch.cuda.synchronize()
        self.tensor.copy_(state["tensor"])


weights = Weights()


{begin}
def train():
    attempt, rank = int(os.environ["RAYLAUNCH_ATTEMPT"]), dist.get_rank()
    state = State(weights=weights, every=1, random_state=False)
    done = state.restore()
    fake_nccl.note("seen", f"{{attempt}} {{done}} {{weights.tensor[0].item():g}}")
    for step in range(done, STEPS):
        grad = fake_nccl.on_device(torch.full((SIZE,), rank + 1.0))
        if attempt == 1 and step == AT:
            if rank in DEAD:
                time.sleep(0.5)  # the others come to the collective
                os.kill(os.getpid(), signal.SIGKILL)
            if rank in HUNG:
                time.sleep(1000)
        dist.all_reduce(grad)
        fake_nccl.launch(lambda grad=grad: weights.tensor.add_(grad))
        {before_commit}
        state.commit(step)
    torch.cuda.synchronize()
    return weights.tensor[0].item()


fake_nccl.note("result", f"{{train():g}}")
{end}
"""


ELASTIC = """
from raylaunch.worker import elastic
@elastic(backend="fakenccl")
"""
PLAIN = "dist.init_process_group('fakenccl')"
"""How a script begins that has survivors, and one that has none."""


MODELS = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import fake_nccl
from raylaunch.worker import State, elastic

STEPS = 6
fake_nccl.install()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    return model, lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss(model, step, rank):
    torch.manual_seed(100 * step + rank)
    return model(torch.randn(4, 8)).square().mean()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@elastic(backend="fakenccl")
def train():
    attempt, rank = int(os.environ["RAYLAUNCH_ATTEMPT"]), dist.get_rank()
    model, make = build()
    if {ddp}:
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    optimizer = make()
    state = State(model=model, optimizer=optimizer, every=1, random_state=False)
    done = state.restore()
    fake_nccl.note("seen", f"{{attempt}} {{done}}")
    for step in range(done, STEPS):
        if attempt == 1 and step == 3 and rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        for tensor in (*model.parameters(), *(one["momentum_buffer"] for one in optimizer.state.values())):
            fake_nccl.on_device(local(tensor.detach()))
        state.commit(step)
    return [local(one.detach()) for one in model.parameters()]


found, (wanted, make) = train(), build()
optimizer = make()
for step in range(STEPS):
    optimizer.zero_grad()
    (sum(loss(wanted, step, rank) for rank in range(2)) / 2).backward()
    optimizer.step()
wanted = [one.detach() for one in wanted.parameters()]
if not {ddp}:
    wanted = [one.chunk(2)[dist.get_rank()] if one.shape[0] > 1 else one[dist.get_rank():] for one in wanted]
same = all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(found, wanted, strict=True))
fake_nccl.note("result", f"{{same}}")
"""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What became of a run of two workers."""

    code: int
    err: str
    notes: dict[str, list[list[str]]]
    """By name: of each process its lines."""

    @property
    def stayed(self) -> int:
        """How many workers were in both attempts."""
        return sum(len(lines) == 2 for lines in self.notes["seen"])

    @property
    def results(self) -> list[str]:
        return [line for lines in self.notes.get("result", []) for line in lines]


def train(
    alone: tuple[dict[str, str], Path],
    *,
    begin: str = ELASTIC,
    at: int = 5,
    dead: tuple[int, ...] = (),
    hung: tuple[int, ...] = (),
    before_commit: str = "",
    end: str = "",
    **more: Any,
) -> Trained:
    """Train with `TRAINS`. `more`: as `run` takes it."""
    words = {"begin": begin, "at": at, "dead": dead, "hung": hung, "end": end}
    return run(alone, TRAINS.format(**words, before_commit=before_commit), **more)


def run(
    alone: tuple[dict[str, str], Path], script: str, *, faults: dict[str, Any] | None = None, **job: Any
) -> Trained:
    """Run a script with two workers, usually on one node. `faults`: see `fake_nccl`."""
    env, folder = alone
    env |= fake_nccl.environment(folder, faults)
    job = {"nnodes": 1, "max_restarts": 1, "preload": ["torch", "torch.distributed"]} | job
    process = start(env, folder, script, **job)
    _, err = process.communicate(timeout=150)
    notes: dict[str, list[list[str]]] = {}
    for path in sorted((folder / "fake").glob("*-*")):
        if path.is_file():
            notes.setdefault(path.name.partition("-")[0], []).append(path.read_text().splitlines())
    return Trained(code=process.returncode, err=err, notes=notes)


SUM = str(9 * (1 + 2))
"""What two ranks have trained in nine steps."""


def test_a_survivor_goes_on_when_a_rank_has_died(alone_with_torch):
    trained = train(alone_with_torch, dead=(1,), nnodes=2, nproc_per_node=1)
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert trained.stayed == 1, trained.err


def test_no_garbage_is_committed_or_returned_when_all_ranks_hang_in_one_collective(alone_with_torch):
    """All stay. The abort lets the commit that waits for the collective be copied, on all ranks, or training end.

    The watchdog does nothing in such a script.
    """
    faults = {"stuck": [[1, 6], [2, 4]], "watchdog": [1, 6, 1]}
    trained = train(alone_with_torch, faults=faults, hang_timeout=3, max_restarts=2)
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert [lines[1:] for lines in trained.notes["seen"]] == [["2 5 15", "3 8 24"]] * 2, trained.err


@pytest.mark.parametrize("faults", [{"abort": "poisons"}, {"abort_seconds": -1}], ids=["poisons", "never"])
def test_a_survivor_that_cannot_go_on_is_started_again_and_is_no_failure(alone_with_torch, faults):
    """One restart is enough, for the rank that has died."""
    begin = f"from raylaunch.worker.survivors import survivor\nsurvivor.LEAVE_SECONDS_WITH_NCCL = 2\n{ELASTIC}"
    trained = train(alone_with_torch, begin=begin, dead=(1,), faults=faults)
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert trained.stayed == 0, trained.err


@pytest.mark.parametrize("records", [True, False], ids=["by the recorder", "by stacks"])
def test_the_rank_that_does_not_join_is_named_and_not_those_that_wait_for_their_gpu(alone_with_torch, records):
    """All ranks make the same number of steps, and the one that hangs falls silent last."""
    faults = {"spins": True, "records": records}
    waits = "torch.cuda.synchronize(); time.sleep(0.2 * rank)"
    trained = train(alone_with_torch, hung=(1,), before_commit=waits, faults=faults, hang_timeout=4)
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert "rank 1 on node-1 hung" in trained.err
    recorded = "Flight Recorder: rank 1 has not called all_reduce, number 6 of default_pg, in which rank 0 waits"
    assert (recorded in trained.err) == records


def test_ranks_that_the_watchdog_ends_leave_no_garbage(alone_with_torch):
    """All hang in one collective, and no process can stay. As torchrun has it, torch would abort NCCL before."""
    trained = train(alone_with_torch, begin=PLAIN, faults={"stuck": [[1, 6]], "watchdog": [1, 6, 1]})
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert [lines[0] for lines in trained.notes["seen"]].count("2 5 15") == 2, trained.notes
    assert "SIGABRT" in trained.err
    assert "Watchdog caught collective operation timeout" in trained.err


def test_a_group_that_is_freed_slowly_is_no_failure_and_no_hang(alone_with_torch):
    """At the end of the script, though `shutdown_timeout` is shorter. The group that was aborted before is not freed."""
    faults = {"destructor_seconds": 6}
    trained = train(alone_with_torch, end="dist.destroy_process_group()", dead=(1,), faults=faults, shutdown_timeout=1)
    assert (trained.code, trained.results) == (0, [SUM] * 2), trained.err
    assert trained.stayed == 1, trained.err
    assert [len(lines) for lines in trained.notes["freed"]] == [1, 1], trained.notes
    assert "hung" not in trained.err


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard"])
def test_a_model_goes_on_without_garbage_when_a_rank_has_died(alone_with_torch, kind):
    """The survivor stands in the collective of a backward or a forward pass, and computes with what the abort leaves."""
    script = MODELS.format(ddp=kind == "DistributedDataParallel")
    preload = ["torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"]
    trained = run(alone_with_torch, script, faults={"waits": True}, preload=preload)
    assert (trained.code, trained.results) == (0, ["True"] * 2), trained.err
    assert trained.stayed == 1, trained.err
    seen = [line for lines in trained.notes["seen"] for line in lines]
    assert seen.count("2 2") == 2, trained.notes  # the next commit, of which copies are queued, died with the rank
