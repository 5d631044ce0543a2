"""What the steps that workers wrote down say of the worlds that trained."""

from __future__ import annotations

from itertools import pairwise

from tests.hosts.conftest import Run


def began(run: Run, attempt: int) -> float:
    """When all ranks of the attempt had done a step: before that, the first wait for the last in any real training."""
    first: dict[int, float] = {}
    for step in run.steps():
        if step.attempt == attempt:
            first.setdefault(step.rank, step.at)
    return max(first.values())


def ended(run: Run, attempt: int) -> float:
    """When the last step of any rank of the attempt was done."""
    return max(step.at for step in run.steps() if step.attempt == attempt)


def never_two_worlds(run: Run) -> bool:
    """On no host was a step of an attempt done after the next one began."""
    attempts = sorted({step.attempt for step in run.steps()})
    return all(ended(run, one) < began(run, other) for one, other in pairwise(attempts))


def lost_steps(run: Run) -> list[int]:
    """Steps that were done in two attempts, or in none."""
    attempts = sorted({step.attempt for step in run.steps()})
    done = [{step.number for step in run.steps() if step.attempt == attempt} for attempt in attempts]
    twice = {number for one, other in pairwise(done) for number in one & other}
    never = set(range(max(done[-1]))) - set().union(*done)
    return sorted(twice | never)


def hosts_by_rank(run: Run, attempt: int) -> list[str]:
    """Where its ranks ran, in order."""
    found = {step.rank: step.host for step in run.steps() if step.attempt == attempt}
    return [found[rank] for rank in sorted(found)]
