"""A host is lost: the script goes on from what its `State` had, by the copies that the other hosts have of its parts."""

from __future__ import annotations

import re

import pytest

from tests.hosts.steps import hosts_by_rank, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

KEEPS = """
    import os, socket, time
    import torch
    import torch.distributed as dist
    from pathlib import Path
    from torch.nn.parallel import DistributedDataParallel
    from raylaunch.worker import State
    attempt, rank, world = (os.environ[name] for name in ("RAYLAUNCH_ATTEMPT", "RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(600, 601))
    state = State(model=model, every=1)
    done = state.restore()
    assert done == 0 or all(bool((one == done).all()) for one in model.parameters()), done
    total = state.get("total", int(rank))
    assert total == sum(range(done)) + int(rank), (done, total)
    state["ballast"] = os.urandom(3_000_000)
    with open(f"steps.{attempt}.{rank}.{socket.gethostname()}", "a", buffering=1) as log:
        step = done
        while not Path("enough").exists():
            total += step
            state["total"] = total
            with torch.no_grad():
                for one in model.parameters():
                    one.fill_(step + 1)
            time.sleep(0.1)
            state.commit(step)
            log.write(f"{time.monotonic()} {attempt} {rank} {world} {step} {socket.gethostname()}\\n")
            step += 1
"""
"""Each rank has a state of its own, of which it checks the value, and one that is equal on all ranks. `commit` is what
makes ranks wait for each other.
"""


def first_steps(run, attempt: int) -> dict[int, int]:
    """Return the first step of each rank of an attempt."""
    found: dict[int, int] = {}
    for step in run.steps():
        if step.attempt == attempt:
            found.setdefault(step.rank, step.number)
    return found


def last_step(run, attempt: int) -> int:
    """Return the last step that all ranks of an attempt have done."""
    last: dict[int, int] = {}
    for step in run.steps():
        if step.attempt == attempt:
            last[step.rank] = step.number
    return min(last.values())


def test_training_goes_on_from_the_copies_of_a_lost_host_and_what_had_none_is_said(launcher, hosts):
    """A spare host takes its place at once: Ray itself takes half a minute to notice that a host is gone."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(launcher.folder)}
    run = launcher.start(
        KEEPS,
        nnodes=2,
        spares=1,
        nproc_per_node=2,
        cpus_per_worker=0.5,
        preload=["torch._dynamo", "torch.nn.parallel"],
        env=env,
    )
    first = run.wait_for_world(4)
    run.wait_for(lambda: len(run.events("NodeJoined")) == 3, name="the spare to be warm")
    run.wait_for(lambda: last_step(run, first) > 24, name="steps")
    member = next(host for host in hosts.hosts[1:] if host.name in hosts_by_rank(run, first))
    hosts.kill(member)
    run.wait_for(lambda: run.events("NodeLost"), name="the loss to be known")
    assert hosts.alive(member), "Ray knew it first"
    second = run.wait_for_world(4, after=first)
    assert member.name not in hosts_by_rank(run, second)
    (steps,) = set(first_steps(run, second).values())
    assert steps > 8
    assert never_two_worlds(run)
    run.stop()
    assert "AssertionError" not in run.err
    assert "was lost" in run.result["attempts"][first - 1]["why_ended"]
    said = re.findall(r"the state after (\d+) steps is restored from memory; (\d+) more step", run.err)
    assert last_step(run, first) + 1 <= steps + sum(int(lost) for _, lost in said)
    assert {int(after) for after, _ in said} <= {steps}
