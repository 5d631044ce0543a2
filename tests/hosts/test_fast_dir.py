"""A script that knows nothing of raylaunch saves to RAYLAUNCH_FAST_DIR, and goes on from there whatever is killed."""

from __future__ import annotations

import signal

import pytest

from tests.hosts.host import send
from tests.hosts.steps import copied, hosts_by_rank, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SAVES = """
    import os, socket, time
    from pathlib import Path
    attempt, rank, world = (os.environ[name] for name in ("RAYLAUNCH_ATTEMPT", "RANK", "WORLD_SIZE"))
    snapshot = Path(os.environ["RAYLAUNCH_FAST_DIR"], "snapshot")
    step = int(snapshot.read_text()) + 1 if snapshot.exists() else 0
    with open(f"steps.{attempt}.{rank}.{os.getpid()}", "a", buffering=1) as log:
        while not Path("enough").exists():
            log.write(f"{time.monotonic()} {attempt} {rank} {world} {step} {socket.gethostname()}\\n")
            time.sleep(0.02)
            if step % 25 == 0 and os.environ["LOCAL_RANK"] == "0":
                snapshot.with_suffix(".new").write_text(str(step))
                os.replace(snapshot.with_suffix(".new"), snapshot)
            step += 1
"""
"""One worker of each node saves, as in PyTorch's tutorial for several nodes.

Not ten times a second: a file that is replaced before it could be copied is copied later, which may take a minute then.
"""


def steps_of(run, attempt: int) -> dict[int, list[int]]:
    """Return the steps of each rank of an attempt."""
    found: dict[int, list[int]] = {}
    for step in run.steps():
        if step.attempt == attempt:
            found.setdefault(step.rank, []).append(step.number)
    return found


def folders(hosts, host) -> list[str]:
    """Return the folders that there are on a host."""
    return [name for name in hosts.shared_memory(host) if name.startswith("raylaunch-files-")]


def next_world(run, size: int, before: int, done: int) -> tuple[int, int]:
    """Return the next attempt with so many workers, all of which have gone on from after the step `done`, or later.

    And a step that they have done in it.
    """
    now = run.wait_for_world(size, after=before)
    first = {rank: steps[0] for rank, steps in steps_of(run, now).items()}
    assert min(first.values()) > done, (done, first)  # one that was not found would be step 0
    least = max(first.values()) + 30
    run.wait_for(lambda: min(max(steps) for steps in steps_of(run, now).values()) > least, name="more steps")
    return now, min(first.values()) + 24  # every 25th step is saved


def test_files_outlive_workers_subreaper_agent_and_host_and_nothing_is_left(launcher, hosts):
    """What is left of the run on any host is seen by the fixture."""
    run = launcher.start(SAVES, nnodes="2:3", nproc_per_node=1, max_restarts=10)
    attempt = run.wait_for_world(3)
    run.wait_for(lambda: min(max(steps) for steps in steps_of(run, attempt).values()) > 30, name="steps")
    member = hosts.hosts[1]
    send([process.pid for host in hosts.hosts for process in run.workers(host)], signal.SIGKILL)
    attempt, done = next_world(run, 3, attempt, 14)
    for word in ("raylaunch: subreaper", "raylaunch: agent"):
        send([process.pid for process in run.processes(member, word)], signal.SIGKILL)
        attempt, done = next_world(run, 3, attempt, done)
    run.wait_for(
        lambda: len(folders(hosts, member)) == 1, name="the folder of the agent that was killed to be taken over"
    )
    lost = next(host for host in hosts.hosts if host is not hosts.head and host.name in hosts_by_rank(run, attempt)[:2])
    run.wait_for(lambda: copied(hosts, run.nodes_on(lost)[-1], "snapshot") > done, name="its snapshot to be copied")
    hosts.kill(lost)
    hosts.ask("bury", lost.node_id)  # Ray itself takes half a minute to notice that a host is gone
    attempt, _ = next_world(run, 2, attempt, done)
    assert lost.name not in hosts_by_rank(run, attempt)
    assert never_two_worlds(run)
    run.stop()
    assert "RAYLAUNCH_FAST_DIR" not in run.err, run.err
