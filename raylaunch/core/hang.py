"""Who is at fault when workers hang, as far as their stacks tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from raylaunch.core.events import WorkersHung
from raylaunch.core.failure import Failure
from raylaunch.core.progress import Hang, Silence
from raylaunch.core.ranks import Assignment
from raylaunch.core.stacks import IN_THE_KERNEL, STOPPED, Stack, StackGroup, grouped

_EXIT_CODE = -9
"""What is to become of them: who is stopped or holds the interpreter's lock hears no other signal."""


def hung(
    hang: Hang,
    at: float,
    parts: Sequence[Assignment],
    pids: Mapping[str, Sequence[int]],
    stacks: Iterable[Stack],
) -> WorkersHung:
    """The event. `parts` of the attempt say where each rank runs, `pids` are by node and local rank."""
    groups = by_oddity(grouped(stacks, (worker.rank for worker in hang.workers)), hang)
    since = {worker.rank: worker.since for worker in hang.workers}
    odd = groups[0]
    named = frozenset(hang.ranks).intersection(odd.ranks) or odd.ranks
    failures = tuple(
        _failure(odd, since.get(rank, at - hang.seconds), at, part, rank - part.base_rank, pids)
        for part in parts
        for rank in part.ranks
        if rank in named
    )
    return WorkersHung(at=at, attempt=parts[0].attempt, failures=failures, groups=tuple(groups))


def by_oddity(groups: Iterable[StackGroup], hang: Hang) -> list[StackGroup]:
    """First those that the others wait for.

    A process that cannot run is odd; else one that is silent and in no collective, while others are; else the few at
    a place of their own; else those that have done fewer steps; else who fell silent first.
    """
    workers = {worker.rank: worker for worker in hang.workers}
    suspects = frozenset(hang.ranks)

    def key(group: StackGroup) -> tuple[object, ...]:
        own = [workers.get(rank, Silence(rank=rank, marks=0, since=math.inf)) for rank in group.ranks]
        return (
            group.note not in (STOPPED, IN_THE_KERNEL),
            suspects.isdisjoint(group.ranks),
            group.waits,
            len(group.ranks),
            min(worker.marks for worker in own),
            min(worker.since for worker in own),
            group.ranks,
        )

    return sorted(groups, key=key)


def _failure(
    group: StackGroup, since: float, at: float, part: Assignment, local_rank: int, pids: Mapping[str, Sequence[int]]
) -> Failure:
    known = [*pids.get(part.node, ())]
    doing = f", {group.doing}" if group.doing else ""
    return Failure(
        attempt=part.attempt,
        node=part.node,
        rank=part.base_rank + local_rank,
        local_rank=local_rank,
        pid=known[local_rank] if local_rank < len(known) else 0,
        at=since,
        exit_code=_EXIT_CODE,
        hung=f"no step for {at - since:.1f} s{doing}",
        hung_at=group.place,
        waited=group.waits,
    )
