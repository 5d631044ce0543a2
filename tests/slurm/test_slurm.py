"""`raylaunch slurm` on a real Slurm, whose four nodes are on this machine."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cluster.conftest import wait_until
from tests.slurm.conftest import PROCTRACK, SWEEP_SECONDS, Slurm

TRAIN = Path(__file__).with_name("train.py")
PATIENCE = 200
"""Ray and torch start on all nodes, on a machine that does other things too."""


class Step(NamedTuple):
    number: int
    world: int
    at: float
    run: str


def job(slurm: Slurm, steps: int, **settings: object) -> Path:
    """Write a job file, and return its path."""
    file = slurm.folder / "job.yaml"
    taken(slurm).unlink(missing_ok=True)
    entrypoint = {"script": str(TRAIN), "args": [str(taken(slurm)), str(steps)]}
    text = {"name": "chain", "entrypoint": entrypoint, "log_dir": str(slurm.folder / "runs"), **settings}
    file.write_text(yaml.safe_dump(text))
    return file


def taken(slurm: Slurm) -> Path:
    return slurm.folder / "steps"


def steps(slurm: Slurm) -> list[Step]:
    """What rank 0 has written: the steps that were done."""
    if not taken(slurm).exists():
        return []
    rows = [line.split() for line in taken(slurm).read_text().splitlines()]
    return [Step(int(number), int(world), float(at), run) for number, world, at, run in rows]


def test_nothing_is_left_of_a_job_that_is_done(slurm):
    """Two nodes; the exit code is the run's, and Ray's processes and folders are gone when Slurm says so."""
    submitted = slurm.submit(str(job(slurm, 3, nnodes=2)))
    wait_until(lambda: not slurm.jobs(), PATIENCE, "the job to end")
    time.sleep(2)
    assert slurm.left() == []
    assert [(step.number, step.world) for step in steps(slurm)] == [(0, 2), (1, 2), (2, 2)]
    assert "ExitCode=0:0" in slurm.run("scontrol", "show", "job", submitted)
    assert slurm.ray_folders() == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", range(int(os.environ.get("CHAINS", "1"))))
def test_a_chain_of_jobs_goes_on_at_the_next_step(slurm, chain):
    """Three jobs, of which each saves when Slurm tells it to end, and leaves nothing behind."""
    submitted = slurm.submit(str(job(slurm, 100_000, nnodes=2, durable=str(slurm.folder / f"durable-{chain}"))))
    for restarts in (0, 1):
        wait_until(lambda: len(runs(slurm)) > restarts, PATIENCE, "the job to train")  # noqa: B023
        slurm.run("scancel", "--signal=TERM", submitted)
        wait_until(lambda: is_put_back(slurm, submitted, restarts + 1), PATIENCE, "the job to be put back")  # noqa: B023
        time.sleep(2)
        assert slurm.left() == []
    wait_until(lambda: len(runs(slurm)) == 3, PATIENCE, "the third job")
    numbers = [step.number for step in steps(slurm)]
    assert numbers == list(range(len(numbers)))


def test_a_job_saves_before_its_time_is_over(slurm):
    """Each has two minutes, of which 30 s are the grace. What one has saved is where the next one begins."""
    durable = str(slurm.folder / "durable-in-time")
    submitted = slurm.submit(str(job(slurm, 100_000, nnodes=2, durable=durable)), "--", "--time=2")
    wait_until(lambda: len(runs(slurm)) == 2, 120 + PATIENCE, "the second job")
    numbers = [step.number for step in steps(slurm)]
    assert numbers == list(range(len(numbers)))
    assert "stopped in time" in slurm.output(submitted)


def runs(slurm: Slurm) -> set[str]:
    return {step.run for step in steps(slurm)}


def is_put_back(slurm: Slurm, submitted: str, times: int) -> bool:
    """Whether the job waits to be started again."""
    shown = slurm.run("scontrol", "show", "job", submitted)
    return "JobState=PENDING" in shown and f"Restarts={times} " in shown


def test_a_node_that_is_taken_away_costs_no_step_and_comes_back(slurm, capsys):
    """Each of two nodes is a job. One gets Slurm's notice, is drained, and joins again when Slurm starts it again.

    Prints for how long there was no step, with the script's own set-up.
    """
    submitted = slurm.submit("--elastic", "1:2", str(job(slurm, 100_000)), "--", "--partition=all")
    wait_until(lambda: worlds(slurm)[-1:] == [2], PATIENCE, "both nodes")
    before = worlds(slurm)
    # The id of this one is that of the array, so that Slurm takes it for all nodes: to put it back must be said otherwise.
    nodes = [line.split() for line in slurm.jobs("--name=chain-node", "--format=%i %A %F")]
    slurm.run("scancel", "--signal=TERM", next(name for name, own, array in nodes if own == array))
    wait_until(lambda: worlds(slurm) == [*before, 1], PATIENCE, "the world without the node")
    wait_until(lambda: worlds(slurm) == [*before, 1, 2], PATIENCE, "the node to be back")
    with capsys.disabled():
        print("\nworld, and seconds without a step:", *pauses(slurm)[-2:])
    numbers = [step.number for step in steps(slurm)]
    assert numbers == list(range(len(numbers)))
    slurm.run("scancel", "--signal=TERM", submitted)
    wait_until(lambda: is_put_back(slurm, submitted, 1), PATIENCE, "the driver's job to be put back")
    slurm.run("scancel", submitted)
    wait_until(lambda: not slurm.jobs(), PATIENCE, "the jobs to end, of which none starts again")
    time.sleep(2)
    assert slurm.left() == []


@pytest.mark.parametrize("options", [(), ("--signal=KILL",)], ids=" ".join)
def test_a_job_that_is_killed_leaves_nothing(slurm, options):
    """Slurm kills the program on each node, but here not what that has started: see `ProctrackType`."""
    submitted = slurm.submit(str(job(slurm, 100_000, nnodes=2)))
    wait_until(lambda: runs(slurm), PATIENCE, "the job to train")
    slurm.run("scancel", *options, submitted)
    wait_until(lambda: not slurm.jobs(), PATIENCE, "the job to end")
    slurm.wait_for_end_of_processes(SWEEP_SECONDS)
    assert slurm.ray_folders() == [] or PROCTRACK == "cgroup"  # the next job removes them


def worlds(slurm: Slurm) -> list[int]:
    """The sizes of the worlds, one after the other."""
    found: list[int] = []
    for step in steps(slurm):
        found += [step.world] if found[-1:] != [step.world] else []
    return found


def pauses(slurm: Slurm) -> list[str]:
    """Before each new world: the time since the last step, of which a step in a world has a twentieth of a second."""
    pairs = itertools.pairwise(steps(slurm))
    return [f"{then.world} -> {now.world}: {now.at - then.at:.2f}" for then, now in pairs if now.world != then.world]
