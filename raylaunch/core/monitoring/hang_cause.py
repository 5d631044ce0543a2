"""The cause of a hang: the ranks that the others wait for, as far as their stacks tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from raylaunch.core.failures.failure import Failure
from raylaunch.core.failures.stacks import IN_THE_KERNEL, STOPPED, Stack, StackGroup, grouped
from raylaunch.core.machine.events import WorkersHung
from raylaunch.core.monitoring.hang_detector import Stall, SuspectedHang
from raylaunch.core.newtypes import RunTime
from raylaunch.core.placement.ranks import Assignment

_EXIT_CODE = -9
"""Hung workers are killed by SIGKILL: those that are stopped, or hold the GIL, react to no other signal."""


def hung(
    hang: SuspectedHang,
    at: RunTime,
    parts: Sequence[Assignment],
    pids: Mapping[str, Sequence[int]],
    stacks: Iterable[Stack],
) -> WorkersHung:
    """Return the event for a hang.

    `parts` are the assignments of the attempt; `pids` are process ids by node, then by local rank.
    """
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


def by_oddity(groups: Iterable[StackGroup], hang: SuspectedHang) -> list[StackGroup]:
    """Sort groups, those first that the others probably wait for.

    These are processes that cannot run; else suspects that are in no collective while others are; else the smaller
    groups; else those with fewer steps; else those that fell silent first.
    """
    workers = {worker.rank: worker for worker in hang.workers}
    suspects = frozenset(hang.ranks)

    def key(group: StackGroup) -> tuple[object, ...]:
        own = [workers.get(rank, Stall(rank=rank, marks=0, since=math.inf)) for rank in group.ranks]
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
        at=RunTime(since),
        exit_code=_EXIT_CODE,
        hung=f"no step for {at - since:.1f} s{doing}",
        hung_at=group.place,
        waited=group.waits,
    )
