"""Hosts that come, are drained and are lost: workers of the others stay, and train as without faults in those worlds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.test_survivors import PATIENT
from tests.hosts.steps import copied, hosts_by_rank

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TRAINS = '''
import json, os, socket, time
import torch
import torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State, elastic

torch.set_default_dtype(torch.float64)


def made():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def loss(model, step, rank):
    """Of the batch that a rank has at a step: in another world there are other batches."""
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(batch) - batch[:, :3]).square().mean()


def compare():
    """Train in one process, with the same number of batches at each step, and compare the losses of rank 0."""
    records = [json.loads(line) for line in Path("losses").read_text().splitlines()]
    last = {record["step"]: record for record in records}  # what was done again counts
    assert sorted(last) == list(range(len(last)))
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, record in sorted(last.items()):
        losses = [loss(model, step, rank) for rank in range(record["world"])]
        for found in record["losses"]:
            assert abs(found - losses[0].item()) < 1e-9 * losses[0].item(), (step, record, losses[0].item())
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    Path("compared").write_text(json.dumps([last[step]["world"] for step in sorted(last)]))


dist.init_process_group("gloo")
model = DistributedDataParallel(made())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)


@elastic
def train():
    attempt, rank, world = (int(os.environ[name]) for name in ("RAYLAUNCH_ATTEMPT", "RANK", "WORLD_SIZE"))
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    sharded = made()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    its = torch.optim.AdamW(sharded.parameters(), lr=0.05)
    state = State(model=model, optimizer=optimizer, sharded=sharded, its=its, every=1)
    step = state.restore()
    files = Path(os.environ["RAYLAUNCH_FAST_DIR"])
    found = {path.name: int(path.read_text()) for path in files.iterdir()}
    same = [os.getpid(), id(model), id(optimizer), str(files)]
    facts = {"same": same, "done": step, "rank": rank, "files": found}
    (files / "new").write_text(str(attempt))
    os.replace(files / "new", files / f"rank-{rank}")
    Path(f"facts-{attempt}-{socket.gethostname()}").write_text(json.dumps(facts))
    with open(f"steps.{attempt}.{rank}.{socket.gethostname()}", "w", buffering=1) as log:
        while True:
            losses = []
            for each, steps in ((model, optimizer), (sharded, its)):
                steps.zero_grad()
                own = loss(each, step, rank)
                own.backward()
                steps.step()
                losses.append(own.item())
            is_over = torch.tensor([float(Path("enough").exists())])
            dist.all_reduce(is_over)
            if rank == 0:
                with open("losses", "a") as file:
                    file.write(json.dumps({"step": step, "world": world, "losses": losses}) + "\\n")
            state.commit(step)
            log.write(f"{time.monotonic()} {attempt} {rank} {world} {step} {socket.gethostname()}\\n")
            step += 1
            if is_over:
                return
            time.sleep(0.1)  # with less, the steps take most of the CPUs while the hosts change


train()
if dist.get_rank() == 0:
    compare()
dist.destroy_process_group()
'''


def test_workers_of_other_hosts_stay_when_one_joins_is_drained_or_lost_and_losses_are_as_without(launcher, hosts):
    """A DDP model that was made before, and one of FSDP2. Ranks change, and the ranks of the lost host come last.

    Each rank finds what it has written to RAYLAUNCH_FAST_DIR, also on another host.
    """
    launcher.script(PATIENT, "sitecustomize.py")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(launcher.folder), "PYTHONPATH": str(launcher.folder)}
    run = launcher.start(TRAINS, nnodes="1:4", max_restarts=0, preload=["torch"], env=env)

    def facts(attempt: int) -> dict[str, Any]:
        found = run.folder.glob(f"facts-{attempt}-*")
        return {path.name.split("-", 2)[2]: json.loads(path.read_text()) for path in found}

    def same(before: int, after: int) -> list[str]:
        """Return the hosts whose worker is the same process with the same objects and the same folder for files."""
        one, two = facts(before), facts(after)
        return sorted(host for host in one if host in two and one[host]["same"] == two[host]["same"])

    def files_are_copied(attempt: int) -> None:
        """Wait until each node has a copy of the file that another one has written in this attempt."""
        there = {host.name: host for host in hosts.hosts}
        written = {run.nodes_on(there[name])[-1]: fact["rank"] for name, fact in facts(attempt).items()}
        run.wait_for(
            lambda: all(copied(hosts, node, f"rank-{rank}") == attempt for node, rank in written.items()), name="copies"
        )

    def has_files(before: int, after: int) -> bool:
        """Return whether each rank has found the file that it, or the rank of which it took the state, had written."""
        world = len(facts(before))
        return all(one["files"][f"rank-{one['rank'] % world}"] == before for one in facts(after).values())

    first = run.wait_for_world(3)
    began = hosts_by_rank(run, first)
    files_are_copied(first)
    added = hosts.add()
    second = run.wait_for_world(4, after=first)
    assert hosts_by_rank(run, second) == [*began, added.name]
    assert same(first, second) == sorted(began)
    assert has_files(first, second)

    files_are_copied(second)
    drained = hosts[1]  # the head, which has rank 0 unless it came late, stays
    hosts.drain(drained, 200)
    third = run.wait_for_world(3, after=second)
    left = [*began, added.name]
    left.remove(drained.name)
    assert hosts_by_rank(run, third) == left
    assert same(second, third) == sorted(left)
    assert has_files(second, third)
    wait_until(lambda: not run.processes(drained), 40, "the memory to be free, which no other agent is to have")

    files_are_copied(third)
    lost = next(host for host in hosts.hosts[1:] if host.name in left)
    hosts.kill(lost)
    fourth = run.wait_for_world(2, after=third)
    left.remove(lost.name)
    assert hosts_by_rank(run, fourth) == left
    assert same(third, fourth) == sorted(left)
    assert has_files(third, fourth)

    (run.folder / "enough").touch()
    run.wait()
    assert run.code == 0, run.err
    assert run.err.count("must be done again") <= 1  # what was lost with the last host; planned changes lose nothing
    assert {2, 3, 4} <= set(json.loads((run.folder / "compared").read_text()))  # it may have begun in a smaller one
