"""Facts about the attempts of a run, from the steps that its workers recorded and the files that are on its hosts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.hosts.conftest import Run
from tests.hosts.hosts import Hosts


def began(run: Run, attempt: int) -> float:
    """Return when all ranks of the attempt had done a step: in real training the first ranks wait for the last."""
    first: dict[int, float] = {}
    for step in run.steps():
        if step.attempt == attempt:
            first.setdefault(step.rank, step.at)
    return max(first.values())


def ended(run: Run, attempt: int) -> float:
    """Return when the last step of any rank of the attempt was done."""
    return max(step.at for step in run.steps() if step.attempt == attempt)


def never_two_worlds(run: Run) -> bool:
    """Assert that no step of an attempt was done after the next attempt began, on any host."""
    attempts = sorted({step.attempt for step in run.steps()})
    return all(ended(run, one) < began(run, other) for one, other in pairwise(attempts))


def lost_steps(run: Run) -> list[int]:
    """Return the steps that were done in two attempts, or in none."""
    attempts = sorted({step.attempt for step in run.steps()})
    done = [{step.number for step in run.steps() if step.attempt == attempt} for attempt in attempts]
    twice = {number for one, other in pairwise(done) for number in one & other}
    never = set(range(max(done[-1]))) - set().union(*done)
    return sorted(twice | never)


def hosts_by_rank(run: Run, attempt: int) -> list[str]:
    """Return the hosts of the attempt's ranks, in order."""
    found = {step.rank: step.host for step in run.steps() if step.attempt == attempt}
    return [found[rank] for rank in sorted(found)]


def copied(hosts: Hosts, node: str, name: str) -> int:
    """Return the number in the newest copy, on any host, of a node's file in RAYLAUNCH_FAST_DIR; -1: there is none."""
    pattern = f"dev/shm/raylaunch-files-*/copies/{node}/{name}"
    found = [path.read_text() for host in hosts.hosts for path in Path(f"/proc/{host.init}/root").glob(pattern)]
    return max(map(int, found), default=-1)
