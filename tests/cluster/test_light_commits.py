"""With `every="auto"` and workers that stay, no step is lost, though few are committed as a whole."""

from __future__ import annotations

import json

import pytest

from tests import fake_nccl
from tests.cluster.conftest import wait_until
from tests.cluster.test_without_cluster import MARK, alone, alone_with_torch, start
from tests.private_cluster import marked

__all__ = ["alone", "alone_with_torch"]

pytestmark = pytest.mark.timeout(300)

TRAINS = """
import hashlib, json, os, signal, sys, time
import torch
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State, elastic
from raylaunch.worker.state import elastic_state

# Whole commits are rare after the first ones, however slow steps are on a busy machine.
elastic_state._AIMED_SHARE = elastic_state._SHARE_BESIDE_LIGHT = 1e-6
STEPS = 18
kills = json.loads(sys.argv[1])  # by attempt: after which step, whom, and whether before the commit
dist.init_process_group(BACKEND)


def train(keeps):
    attempt, rank = int(os.environ["RAYLAUNCH_ATTEMPT"]), dist.get_rank()
    when, victims, is_before = kills.get(str(attempt), (-1, (), False))
    torch.manual_seed(7)
    plain = torch.nn.Sequential(
        torch.nn.Linear(30, 500), torch.nn.BatchNorm1d(500), torch.nn.Dropout(0.1), torch.nn.Linear(500, 601)
    )
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    done, state = 0, None
    if keeps:
        state = State(model=model, optimizer=optimizer)
        done = state.restore()
        Path(f"restored-{attempt}-{rank}").write_text(str(done))
        Path(f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    for step in range(done, STEPS):
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dies = keeps and step == when and rank in victims
        if dies and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        if state is not None:
            hold(model, optimizer)
            state.commit(step)
        if keeps and step == when:
            dist.barrier()  # all have come here
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    tensors = [*model.state_dict().values()]
    tensors += [one for moments in optimizer.state_dict()["state"].values() for one in moments.values()]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


found = elastic(train)(True)
rank = dist.get_rank()
Path(f"found-{rank}").write_text(found)
Path(f"expected-{rank}").write_text(train(keeps=False))
dist.destroy_process_group()
"""


class Trained:
    """What became of a run with two nodes of two ranks. All ranks have ended as without a kill."""

    def __init__(self, alone, kills: dict[int, tuple[int, list[int], bool]], backend: str) -> None:
        env, self.folder = alone
        env |= fake_nccl.environment(self.folder, {"waits": True})
        script = f"{fake_nccl.BEGINS[backend]}\n{TRAINS}"
        entrypoint = {"script": "train.py", "args": [json.dumps(kills)]}
        more = {"nproc_per_node": 2, "max_restarts": 9, "preload": ["torch._dynamo", "torch.nn.parallel"]}
        process = start(env, self.folder, script, entrypoint=entrypoint, durable="kept", **more)
        _, self.err = process.communicate(timeout=200)
        assert process.returncode == 0, self.err
        for rank in range(4):
            found, expected = ((self.folder / f"{name}-{rank}").read_text() for name in ("found", "expected"))
            assert found == expected, rank
        wait_until(lambda: not marked(env[MARK]), 100, "the end of the processes that write the last checkpoint")
        import torch.distributed.checkpoint as dcp

        (kept,) = self.folder.glob("kept/step-*")
        metadata = dcp.FileSystemReader(kept).read_metadata().state_dict_metadata
        assert {"model.module.0.weight", "raylaunch.rank_3"} <= metadata.keys()

    def restored(self, attempt: int) -> int:
        (found,) = {int((self.folder / f"restored-{attempt}-{rank}").read_text()) for rank in range(4)}
        return found

    def pids(self, attempt: int) -> list[str]:
        return [(self.folder / f"pid-{attempt}-{rank}").read_text() for rank in range(4)]


def test_no_step_is_lost_when_ranks_die(alone_with_torch):
    """On a device. One rank dies, and then two of both nodes, with others that stay. Then all die, and the same is restored."""
    run = Trained(
        alone_with_torch, {1: (10, [1], False), 2: (11, [0, 3], False), 3: (12, [0, 1, 2, 3], False)}, "fakenccl"
    )
    assert [run.restored(attempt) for attempt in (1, 2)] == [0, 11], run.err
    first, second = run.pids(1), run.pids(2)
    assert [one == two for one, two in zip(first, second, strict=True)] == [True, False, True, True]
    assert run.restored(3) in (11, 12), "what was restored, unless there was another whole commit"
    assert run.restored(4) in (11, 12, 13)


def test_a_rank_that_dies_between_its_optimizer_and_its_commit(alone_with_torch):
    """What it had to commit is lost, and the others have begun the same step: all go on from the last whole commit."""
    run = Trained(alone_with_torch, {1: (10, [2], True)}, "gloo")
    assert run.restored(2) <= 10, run.err
    assert [one == two for one, two in zip(run.pids(1), run.pids(2), strict=True)] == [True, True, False, True]


def test_all_ranks_of_a_node_die(alone_with_torch):
    """The survivors are on the other node, from which it gets what it lacks."""
    run = Trained(alone_with_torch, {1: (10, [0, 1], False)}, "fakenccl")
    assert run.restored(2) == 11, run.err
