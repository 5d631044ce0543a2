"""A script with `State` loses no committed step, whichever process is killed, and ends as if none had been."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TRAINS = '''
import hashlib, os, random, signal, sys, time
import numpy, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State
from raylaunch.worker.state.commit_buffer import CommitBuffer, CommitHeader

STEPS = 12
KILLS = {1: ("worker", 1), 2: ("sealing", 3), 3: ("writing", 4), 4: ("workers", 5), 5: ("fork server", 7),
         6: ("subreaper", 9), 7: ("agent", 10)}
attempt = int(os.environ["RAYLAUNCH_ATTEMPT"])
dist.init_process_group("gloo")
rank = dist.get_rank()


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def ancestor(title):
    pid = os.getpid()
    while title not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = int(stat(pid)[1])
    return pid


def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(self, pickled, *, tensors):
    write_pickle(self, pickled[: len(pickled) // 2], tensors=tensors)
    killed()


write_pickle = CommitBuffer.write_pickle


def arm(what):
    """The next commit of this process is its end."""
    if what == "sealing":
        CommitHeader.seal = killed
    if what == "writing":
        CommitBuffer.write_pickle = write_half


def end(what):
    """kill -9 of something."""
    if what in ("worker", "workers"):
        killed()
    if what == "agent":
        os.kill(int(os.environ["RAYLAUNCH_PAGE"].split("/")[2]), signal.SIGKILL)
    if what in ("fork server", "subreaper"):
        os.kill(ancestor(f"raylaunch: {what}"), signal.SIGKILL)
    time.sleep(280)  # it is the end of this process too, which may take a moment


def train(keeps):
    """Train a model with DDP and one with FSDP2. Without `keeps` it is the run without faults."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)
    plain = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 2))
    ddp = DistributedDataParallel(plain)
    sharded = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(rank)
    ddp_optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    done, state = 0, {}
    if keeps:
        state = State(ddp=ddp, sharded=sharded, o1=ddp_optimizer, o2=optimizer, scheduler=scheduler, every=1)
        done = state.restore()
        Path(f"restored-{attempt}-{rank}").write_text(str(done))
    seen = state.get("seen", ())
    for step in range(done, STEPS):
        batch = torch.randn(4, 6) + random.random() + float(numpy.random.rand())
        for model, its in ((ddp, ddp_optimizer), (sharded, optimizer)):
            its.zero_grad()
            model(batch).square().mean().backward()
            its.step()
        scheduler.step()
        seen += (step,)
        if not keeps:
            continue
        state["seen"] = seen
        what, when = KILLS.get(attempt, ("", -1))
        victim = what == "workers" or rank == 1
        if victim and step == when:
            arm(what)
        state.commit(step)
        if step == when:
            dist.barrier()  # all ranks have made the commit
        if victim and step == when:
            end(what)
    assert seen == (*range(STEPS),), seen
    tensors = [*ddp.state_dict().values(), *(one.to_local() for one in sharded.state_dict().values())]
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


expected = Path(f"expected-{rank}")
if attempt == 1:
    expected.write_text(train(keeps=False))
Path(f"found-{rank}").write_text(train(keeps=True))
dist.destroy_process_group()
'''


def test_no_committed_step_is_lost_whatever_is_killed(launcher):
    """2 nodes: of a worker, also in the middle of a commit, of all workers, fork server, subreaper and agent."""
    run = launcher.start(
        entrypoint={"script": launcher.script(TRAINS)},
        nproc_per_node=1,
        max_restarts=9,
        exclude_after=0,
        preload=["torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "numpy"],
        cpus_per_worker=0.1,
        warm=False,
    )
    run.wait()
    assert run.process.returncode == 0, run.err
    for rank in (0, 1):
        found, expected = ((launcher.folder / f"{name}-{rank}").read_text() for name in ("found", "expected"))
        assert found == expected
        restored = [int((launcher.folder / f"restored-{attempt}-{rank}").read_text()) for attempt in range(1, 9)]
        # A rank that was killed in the middle of a commit takes all back to the one before.
        assert restored == [0, 2, 3, 4, 6, 8, 10, 11]
    wait_until(lambda: subreapers(launcher.cluster) == [], 100, "the subreaper of the killed agent to be gone")


def subreapers(cluster) -> list[int]:
    found = []
    for pid in marked(cluster.mark):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found += [pid] if "subreaper" in file.read() else []
        except OSError:
            pass
    return found
