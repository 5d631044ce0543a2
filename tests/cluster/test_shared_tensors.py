"""What DistributedDataParallel keeps equal on all ranks is divided among those of a node, and put together again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.test_without_cluster import MARK, alone, alone_with_torch, start
from tests.private_cluster import marked

__all__ = ["alone", "alone_with_torch"]

pytestmark = pytest.mark.timeout(300)

TRAINS = """
import hashlib, json, os, signal, sys
import torch
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State, elastic

STEPS = 9
differs_at = int(sys.argv[1])  # at this step a parameter of rank 2 becomes another one
kills = json.loads(sys.argv[2])  # by attempt: after which step, whom
stay = "stay" in sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()


def train(keeps):
    attempt = int(os.environ["RAYLAUNCH_ATTEMPT"])
    torch.manual_seed(7)
    plain = torch.nn.Sequential(torch.nn.Linear(30, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 601))
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    done, state = 0, None
    if keeps:
        state = State(model=model, optimizer=optimizer, every=1)
        done = state.restore()
        Path(f"restored-{attempt}-{rank}").write_text(str(done))
        Path(f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    for step in range(done, STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        if (step, rank) == (differs_at, 2):
            with torch.no_grad():
                plain[2].weight.mul_(1.001)
        if state is None:
            continue
        state.commit(step)
        when, victims = kills.get(str(attempt), (-1, ()))
        if step == when:
            dist.barrier()  # all have made the commit
            if rank in victims:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    tensors = [*model.state_dict().values()]
    tensors += [one for moments in optimizer.state_dict()["state"].values() for one in moments.values()]
    if keeps:
        whole = sum(one.numel() * one.element_size() for one in tensors)
        Path(f"memory-{rank}").write_text(json.dumps([own.size / whole for own in state._rank.buffers._buffers if own]))
        torch.save([one.detach().clone() for one in tensors], f"final-{rank}.pt")
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


expected = Path(f"expected-{rank}")
if not stay and os.environ["RAYLAUNCH_ATTEMPT"] == "1":
    expected.write_text(train(keeps=False))
Path(f"found-{rank}").write_text(elastic(train)(True) if stay else train(keeps=True))
if stay:
    expected.write_text(train(keeps=False))
dist.destroy_process_group()
"""


def trained(alone, differs_at: int, kills: dict[int, tuple[int, list[int]]], *args: str, **job) -> tuple[Path, str]:
    """Run the script with two nodes of three ranks; all ranks must end as without a kill."""
    env, folder = alone
    entrypoint = {"script": "train.py", "args": [str(differs_at), json.dumps(kills), *args]}
    more = {"nproc_per_node": 3, "max_restarts": 9, "preload": ["torch._dynamo", "torch.nn.parallel"]}
    process = start(env, folder, TRAINS, entrypoint=entrypoint, **more, **job)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    for rank in range(6):
        found, expected = ((folder / f"{name}-{rank}").read_text() for name in ("found", "expected"))
        assert found == expected, rank
    return folder, err


def restored(folder: Path, attempt: int) -> set[int]:
    return {int((folder / f"restored-{attempt}-{rank}").read_text()) for rank in range(6)}


def test_each_rank_holds_a_share_and_nothing_is_lost(alone_with_torch):
    """Three ranks, so that tensors are cut. Others stay when one dies, then all die; a checkpoint on disk has all."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder, err = trained(alone_with_torch, -1, {1: (3, [1]), 2: (6, [*range(6)])}, "stay", durable="kept")
    assert [restored(folder, attempt) for attempt in (1, 2, 3)] == [{0}, {4}, {7}]
    pids = [[(folder / f"pid-{attempt}-{rank}").read_text() for rank in range(6)] for attempt in (1, 2)]
    assert pids[0][1] != pids[1][1], "it was killed"
    assert any(one == two for one, two in zip(*pids, strict=True)), "workers stayed"
    assert "differ" not in err
    for rank in range(6):
        sizes = json.loads((folder / f"memory-{rank}").read_text())
        assert len(sizes) == 3, "two that take turns, and one for the disk"
        assert all(0.3 < size < 0.4 for size in sizes), f"{sizes}: nearly all is shared by three"
    final = torch.load(folder / "final-0.pt")
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    names += ["2.weight", "2.bias"]
    target = {"model": {f"module.{name}": torch.zeros_like(final[n]) for n, name in enumerate(names)}}
    wait_until(
        lambda: not marked(alone_with_torch[0][MARK]), 100, "the end of the processes that write the last checkpoint"
    )
    dcp.load(target, checkpoint_id=str(folder / "kept/step-9"), no_dist=True)
    for number, name in enumerate(names):
        assert torch.equal(target["model"][f"module.{name}"], final[number]), name


def test_what_differs_is_not_shared(alone_with_torch):
    """One rank's parameter changes at step 4. The commit after that is not restored; later ones are each rank's own."""
    folder, err = trained(alone_with_torch, 4, {1: (4, [1]), 2: (6, [4])})
    assert [restored(folder, attempt) for attempt in (1, 2, 3)] == [{0}, {4}, {7}]
    assert "differ between the ranks; each rank commits its own" in err
