"""The ranks that the others wait for, as far as their stacks tell: in a hang, and in a start that takes long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from raylaunch.core.failures.failure import NO_FIRST_STEP, Failure
from raylaunch.core.failures.stack_notes import IN_THE_KERNEL, STOPPED
from raylaunch.core.failures.stacks import Stack, StackGroup, grouped, missing_call
from raylaunch.core.machine.events_and_actions import WorkersHung
from raylaunch.core.monitoring.hang_detector import Stall, SuspectedHang
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.text import count, named_ranks

_EXIT_CODE = -9
"""Hung workers are killed by SIGKILL: a worker that is stopped, or holds the GIL, reacts to no other signal."""
_MAX_PLACES = 4
_MAX_NODES = 2
"""The number of places, and of nodes of each, that are named of ranks that have not joined the others."""


def hung(
    hang: SuspectedHang,
    at: RunTime,
    parts: Sequence[Assignment],
    pids: Mapping[NodeId, Sequence[int]],
    stacks: Iterable[Stack],
) -> WorkersHung:
    """Return the event for a hang.

    `parts` are the assignments of the attempt; `pids` are process ids by node, then by local rank.
    """
    stacks = [*stacks]
    missing = missing_call({stack.rank: stack.calls for stack in stacks})
    absent = missing.ranks if missing is not None else frozenset()
    groups = by_oddity(grouped(stacks, (worker.rank for worker in hang.workers)), hang, absent)
    stalls = {worker.rank: worker for worker in hang.workers}
    faults = {stack.rank: stack.gpu_faults for stack in stacks}
    odd = groups[0]
    named = absent.intersection(odd.ranks) or frozenset(hang.ranks).intersection(odd.ranks) or odd.ranks
    failures = tuple(
        _failure(
            odd,
            missing.text if missing is not None else "",
            faults.get(rank, ""),
            stalls.get(rank, Stall(rank=rank, marks=1, since=at - hang.seconds)),
            at,
            part,
            pids,
        )
        for part in parts
        for rank in part.ranks
        if rank in named
    )
    return WorkersHung(at=at, attempt=parts[0].attempt, failures=failures, groups=tuple(groups))


def by_oddity(
    groups: Iterable[StackGroup], hang: SuspectedHang, absent: AbstractSet[int] = frozenset()
) -> list[StackGroup]:
    """Sort groups, those first that the others probably wait for. `absent`: ranks that have not called a collective.

    These are processes that cannot run; else those ranks; else suspects that are in no collective while others are;
    else the smaller groups; else the workers with fewer steps; else the first to fall silent.
    """
    workers = {worker.rank: worker for worker in hang.workers}
    suspects = frozenset(hang.ranks)

    def key(group: StackGroup) -> tuple[object, ...]:
        own = [workers.get(rank, Stall(rank=rank, marks=0, since=math.inf)) for rank in group.ranks]
        return (
            group.note not in (STOPPED, IN_THE_KERNEL),
            absent.isdisjoint(group.ranks),
            suspects.isdisjoint(group.ranks),
            group.waits or group.may_wait_for_gpu,
            len(group.ranks),
            min(worker.marks for worker in own),
            min(worker.since for worker in own),
            group.ranks,
        )

    return sorted(groups, key=key)


def describe_absent(
    groups: Iterable[StackGroup], marked: AbstractSet[int], parts: Sequence[Assignment], seconds: float
) -> str:
    """Say, for a person, which ranks have not joined the others `seconds` after the start, and where they are.

    `groups` are of all workers that are alive; `marked` are the ranks that have completed a step. These have joined, as
    have ranks that seem to wait for others. Return "" if all ranks have joined, or none has.
    """
    found = [(group, sorted(set(group.ranks) - marked)) for group in groups]
    late = [(group, ranks) for group, ranks in found if ranks and not group.waits]
    missing = sum(len(ranks) for _, ranks in late)
    total = sum(len(group.ranks) for group, _ in found)
    if missing in (0, total):
        return ""
    places = [_place(group, ranks, parts) for group, ranks in late[:_MAX_PLACES]]
    places += ["..."] if len(late) > _MAX_PLACES else []
    which = f"{missing} of {count(total, 'rank')} {'has' if missing == 1 else 'have'}"
    return f"{which} not joined the others after {seconds:.0f} s: {'; '.join(places)}"


def _place(group: StackGroup, ranks: Sequence[int], parts: Sequence[Assignment]) -> str:
    nodes = [part.node for part in parts if not set(part.ranks).isdisjoint(ranks)]
    where = " and ".join(nodes) if len(nodes) <= _MAX_NODES else count(len(nodes), "node")
    return f"{named_ranks(ranks)} on {where}, {group.doing}"


def _failure(
    group: StackGroup,
    recorded: str,
    gpu_faults: str,
    worker: Stall,
    at: float,
    part: Assignment,
    pids: Mapping[NodeId, Sequence[int]],
) -> Failure:
    known = [*pids.get(part.node, ())]
    local_rank = worker.rank - part.base_rank
    what = "no step" if worker.marks else NO_FIRST_STEP
    doing = f", {group.doing}" if group.doing else ""
    recorded = f"; Flight Recorder: {recorded}" if recorded else ""
    faulty = f"; {gpu_faults}" if gpu_faults else ""
    return Failure(
        attempt=part.attempt,
        node=part.node,
        rank=worker.rank,
        local_rank=local_rank,
        pid=known[local_rank] if local_rank < len(known) else 0,
        at=RunTime(worker.since),
        exit_code=_EXIT_CODE,
        hung=f"{what} for {at - worker.since:.1f} s{doing}{recorded}{faulty}",
        hung_at=group.place,
        waited=group.waits,
    )
