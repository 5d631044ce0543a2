"""Hangs of a training job: each time the rank that causes it is named, with its stack, and the attempt is restarted."""

from __future__ import annotations

import pytest

from tests.cluster.test_stopped_processes import events_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

HANGS = """
import ctypes, os, time
import torch
import torch.distributed as dist
from raylaunch import worker

RANK, ATTEMPT = int(os.environ["RANK"]), worker.context().attempt


def hold_the_gil():
    ctypes.PyDLL(None).read(os.pipe()[0], None, 1)  # unlike a sleep it goes on after a signal


class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(1000)


def wait_for_data():
    next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))


WAYS = {1: (0, hold_the_gil), 2: (1, wait_for_data)}

with worker.section("the start, which takes long on a busy machine"):
    dist.init_process_group("gloo")
    dist.barrier()
who, hang = WAYS.get(ATTEMPT, (None, None))
for step in range(40):
    if step == 20 and RANK == who:
        hang()
    dist.all_reduce(torch.ones(1))
    worker.heartbeat()
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_each_hang_is_found_and_its_rank_named(launcher):
    """One rank holds the GIL; later one waits for its data loader."""
    run = launcher.run(
        entrypoint={"script": launcher.script(HANGS)},
        nproc_per_node=1,
        max_restarts=2,
        hang_timeout=8,
        preload=["torch", "torch.distributed", "torch.utils.data"],
    )
    assert run.code == 0, run.err
    hangs = events_of(run, "WorkersHung")
    assert [[failure["rank"] for failure in hung["failures"]] for hung in hangs] == [[0], [1]]
    descriptions = [" ".join(hung["groups"][0]["frames"]) + hung["groups"][0]["note"] for hung in hangs]
    places = ("hold_the_gil", "wait_for_data")
    assert all(place in what for place, what in zip(places, descriptions, strict=True)), descriptions
    assert all("all_reduce" in " ".join(hung["groups"][1]["frames"]) for hung in hangs)
    assert run.result["restarts"] == 2
    texts = [(run.run_dir / f"attempt-{attempt}" / "stacks.txt").read_text() for attempt in (1, 2)]
    assert all(f"--- rank {rank}," in text for text in texts for rank in range(2))
    assert {progressed["attempt"] for progressed in events_of(run, "Progressed")} == {1, 2, 3}


LEFT_ALONE = """
import os
import torch
import torch.distributed as dist
from raylaunch import worker

with worker.section("the start, which takes long on a busy machine"):
    dist.init_process_group("gloo")
    state = worker.State(net=torch.nn.Linear(2, 2))
    first = state.restore()
    dist.barrier()
for step in range(first, 20):
    worker.heartbeat()
    dist.all_reduce(torch.ones(1))
    if step == 0 and os.environ["RANK"] == "1" and worker.context().attempt == 1:
        os._exit(0)
    state.commit(step)
dist.destroy_process_group()
"""


def test_ranks_that_wait_in_a_commit_for_one_that_has_ended_hang(launcher):
    run = launcher.run(
        entrypoint={"script": launcher.script(LEFT_ALONE)}, nproc_per_node=1, max_restarts=1, hang_timeout=5
    )
    assert run.code == 0, run.err
    (hung,) = events_of(run, "WorkersHung")
    assert "commit_agreement" in hung["groups"][0]["frames"][0]
    assert run.result["restarts"] == 1


LONG_PAUSES = """
import os, signal, time
import torch
import torch.distributed as dist
from raylaunch import worker

RANK, ATTEMPT = int(os.environ["RANK"]), worker.context().attempt


def evaluate():
    until = time.monotonic() + 200
    while not os.path.exists("seen") and time.monotonic() < until:
        sum(range(10**5))
        time.sleep(0.001)


def train():
    for _ in range(5):
        dist.all_reduce(torch.ones(1))
        worker.heartbeat()


dist.init_process_group("gloo")
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
SHORT_FLOOR = """
from raylaunch.core.monitoring import hang_detector, hang_policy
assert hasattr(hang_detector, "AUTO_FLOOR") and hasattr(hang_policy, "LOOK_SECONDS")
hang_detector.AUTO_FLOOR, hang_policy.LOOK_SECONDS = 2, 0.5
"""


def test_auto_distinguishes_long_computations_from_hangs(launcher):
    """The floor of `auto` is two seconds. All ranks wait for each other; one is stopped; one sleeps; one computes, and that is
    no hang.
    """
    launcher.script(SHORT_FLOOR, "sitecustomize.py")
    run = launcher.start(
        entrypoint={"script": launcher.script(LONG_PAUSES)},
        nnodes=1,
        nproc_per_node=2,
        max_restarts=3,
        preload=["torch", "torch.distributed"],
        env={"PYTHONPATH": str(launcher.folder)},
    )
    is_said = any("but rank 0 works, at train.py:" in line for line in run.process.stderr)
    (launcher.folder / "seen").touch()
    run.wait()
    assert (run.code, is_said) == (0, True), run.err
    hangs = events_of(run, "WorkersHung")
    assert [[failure["rank"] for failure in hung["failures"]] for hung in hangs] == [[0, 1], [1], [1]]
    assert run.result["restarts"] == 3
