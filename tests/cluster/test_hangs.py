"""Ways in which a training hangs: each time the rank at fault is named, with what it was doing, and all begin again."""

from __future__ import annotations

import pytest

from tests.cluster.test_beats_ray import facts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WAYS = """
import os, re, time
import torch
import torch.distributed as dist
from raylaunch import worker

RANK, ATTEMPT = int(os.environ["RANK"]), worker.context().attempt


def hold_the_gil():
    re.match(r"(a+)+$", "a" * 64 + "b")


class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(1000)


def wait_for_data():
    next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))


WAYS = {1: (0, hold_the_gil), 2: (1, wait_for_data)}

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
who, hang = WAYS.get(ATTEMPT, (None, None))
for step in range(40):
    if step == 20 and RANK == who:
        hang()
    weight.grad = torch.ones(1)
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_each_way_is_found_and_the_right_rank_named(launcher):
    """Of a script that knows nothing of us but which attempt it is: the GIL, a data loader."""
    run = launcher.run(
        entrypoint={"script": launcher.script(WAYS)},
        nproc_per_node=1,
        max_restarts=2,
        hang_timeout=4,
        preload=["torch", "torch.distributed", "torch.utils.data", "torch._dynamo"],
    )
    assert run.code == 0, run.err
    hangs = facts(run, "WorkersHung")
    assert [[failure["rank"] for failure in hung["failures"]] for hung in hangs] == [[0], [1]]
    doing = [" ".join(hung["groups"][0]["frames"]) + hung["groups"][0]["note"] for hung in hangs]
    places = ("hold_the_gil", "wait_for_data")
    assert all(place in what for place, what in zip(places, doing, strict=True)), doing
    assert all("all_reduce" in " ".join(hung["groups"][1]["frames"]) for hung in hangs)
    assert run.result["restarts"] == 2
    kept = [(run.run_dir / f"attempt-{attempt}" / "stacks.txt").read_text() for attempt in (1, 2)]
    assert all(f"--- rank {rank}," in text for text in kept for rank in range(2))
    assert {progressed["attempt"] for progressed in facts(run, "Progressed")} == {1, 2, 3}


PATIENT = """
import os, signal, time
import torch
import torch.distributed as dist
from raylaunch import worker

RANK, ATTEMPT = int(os.environ["RANK"]), worker.context().attempt


def evaluate():
    until = time.monotonic() + 5
    while time.monotonic() < until:
        sum(range(10**5))


def train():
    for _ in range(5):
        weight.grad = torch.ones(1)
        dist.all_reduce(weight.grad)
        optimizer.step()


dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
train()
if ATTEMPT == 1:
    dist.recv(torch.ones(1), 1 - RANK)
if RANK == 1 and ATTEMPT == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
if RANK == 1 and ATTEMPT == 3:
    time.sleep(1000)
if RANK == 0 and ATTEMPT == 4:
    evaluate()
dist.barrier()
dist.destroy_process_group()
"""
AT_ONCE = """
from raylaunch.core import evidence, progress
progress.AUTO_FLOOR, evidence.LOOK_SECONDS = 1, 0.1
"""


def test_with_auto_who_works_for_long_is_left_alone_and_who_cannot_go_on_is_found(launcher):
    """Where five minutes are a second: all wait for one another; one is stopped; one does nothing; one evaluates."""
    launcher.script(AT_ONCE, "sitecustomize.py")
    run = launcher.run(
        entrypoint={"script": launcher.script(PATIENT)},
        nproc_per_node=1,
        max_restarts=3,
        preload=["torch", "torch.distributed"],
        env={"PYTHONPATH": str(launcher.folder)},
    )
    assert run.code == 0, run.err
    hangs = facts(run, "WorkersHung")
    assert [[failure["rank"] for failure in hung["failures"]] for hung in hangs] == [[0, 1], [1], [1]]
    assert "but rank 0 works, at train.py:" in run.err
    assert run.result["restarts"] == 3
