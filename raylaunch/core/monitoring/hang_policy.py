"""Decide whether a silent world hangs, from several stack samples of its workers.

A script without heartbeats may be silent for long and healthy: one rank evaluates, or all wait for a download. So
silence alone is no hang, unless the user gave a number of seconds: how long it may last depends on the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from raylaunch.core.failures.stack_notes import AFTER_END
from raylaunch.core.failures.stacks import Stack, StackGroup, grouped, in_commit, main_thread
from raylaunch.core.monitoring.hang_detector import SuspectedHang
from raylaunch.core.newtypes import StrEnum

LOOKS = 10
LOOK_SECONDS = 1.0
"""The number of stack samples of a silent world, and the seconds between two."""

_STILL = 2.0
_LONG = 24.0
"""How many times its limit a world may be silent: if some ranks wait for others that do nothing, and otherwise.

With a limit of five minutes that is ten minutes, when NCCL's own timeout ends a collective, and two hours, long after
gloo's does.
"""
BUSY_CPU = 0.02
"""A process that takes more of one core works. Libraries that monitor their own process take less."""
_BYTES = 64 * 1024
"""A process that reads and writes more bytes per second works."""
IDLE_WAKES = 3
"""Each sample wakes a waiting worker once. One that wakes more often waits for one thing after another."""


class Activity(StrEnum):
    """What a worker did while it was sampled."""

    STOPPED = "is stopped"
    WAITS = "waits for others"
    STANDS = "waits for data, a disk or others, and nothing comes"
    RESTS = "does nothing"
    ENDS = "has done its script, and does not end"
    SYNCHRONIZES = "takes CPU at one place, as all that take some, and may wait for a kernel of NCCL"
    SPINS = "takes CPU, at one place"
    WORKS = "works"


_AT_WORK = frozenset({Activity.SPINS, Activity.WORKS})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSample:
    """The stacks of all workers that answered at one time."""

    at: float
    stacks: tuple[Stack, ...]


def activities(samples: Sequence[StackSample], ranks: Iterable[int]) -> dict[int, Activity]:
    """Return what each of these ranks did, judged by all samples."""
    own: dict[int, list[tuple[float, Stack]]] = {rank: [] for rank in ranks}
    for sample in samples:
        for stack in sample.stacks:
            own.setdefault(stack.rank, []).append((sample.at, stack))
    found = {rank: _activity(rank, views) for rank, views in sorted(own.items())}
    spinning = [own[rank][-1][1] for rank, what in found.items() if what is Activity.SPINS]
    places = {main_thread(stack.text) for stack in spinning}
    if len(found) > 1 and len(places) == 1 and all(stack.has_nccl for stack in spinning):
        found |= {stack.rank: Activity.SYNCHRONIZES for stack in spinning}
    return found


def _activity(rank: int, views: Sequence[tuple[float, Stack]]) -> Activity:
    if not views:
        return Activity.RESTS  # its node does not answer
    if all(stack.is_stopped for _, stack in views):
        return Activity.STOPPED
    places = {main_thread(text) for text in {stack.text for _, stack in views}}
    if all(in_commit(frames) for frames in places):
        return Activity.WAITS
    if len(places - {()}) > 1:
        return Activity.WORKS
    (since, first), (until, last) = views[0], views[-1]
    (group,) = grouped([last], (rank,))
    spent = last.effort - first.effort
    if group.in_collective:  # which may take CPU while it waits
        return Activity.WORKS if spent.wakes > IDLE_WAKES * (len(views) - 1) else Activity.WAITS
    seconds = max(until - since, LOOK_SECONDS)
    if spent.cpu_of_others > BUSY_CPU * seconds or spent.bytes > _BYTES * seconds:
        return Activity.WORKS
    if spent.cpu > BUSY_CPU * seconds:  # a long call; or a wait for a GPU, which may wait for others
        return Activity.SPINS
    if group.note == AFTER_END:
        return Activity.ENDS
    if group.in_backward:
        return Activity.WAITS
    return Activity.STANDS if group.waits or group.loads_data else Activity.RESTS


def max_silence(hang: SuspectedHang, doing: Mapping[int, Activity], times_here: int = 0) -> float:
    """Return for how many seconds the world may be silent; 0 if it hangs.

    `times_here` is how often a world was ended at this place. It doubles the time: the script may only be slow there,
    and would never get past the place.
    """
    many = _limits(hang, set(doing.values()))
    return 0.0 if many <= 1 else hang.limit * many * 2.0**times_here


def snooze_seconds(hang: SuspectedHang, most: float) -> float:
    """Return the seconds until the next samples if `most` seconds of silence are allowed; 0 if it hangs."""
    silent = hang.seconds if hang.others_progress else hang.quiet
    return max(0.0, min(most - silent, max(silent, hang.limit)))


def _limits(hang: SuspectedHang, kinds: AbstractSet[Activity]) -> float:
    """Return how many times its limit the world may be silent."""
    if Activity.STOPPED in kinds:
        return 1.0
    if hang.others_progress:
        return math.inf
    if kinds <= {Activity.WAITS, Activity.ENDS}:
        return 1.0
    if Activity.SYNCHRONIZES in kinds and not kinds & _AT_WORK:
        return _STILL  # also at the start, since NCCL has no other limit in a script with survivors
    if hang.is_young or kinds == {Activity.WORKS}:
        return math.inf
    # If all ranks of the world do nothing, they may wait for new work.
    is_idle = kinds == {Activity.RESTS} and not hang.others_ended
    return _STILL if not kinds & _AT_WORK and not is_idle else _LONG


def describe(hang: SuspectedHang, doing: Mapping[int, Activity], groups: Sequence[StackGroup], most: float) -> str:
    """Describe, for a person, a silence that is no hang yet. `groups` has the suspects first."""
    silent = f"no step for {hang.quiet:.0f} s"
    rank = next((rank for rank, what in doing.items() if what in _AT_WORK), None)
    if rank is None:
        return f"{silent}, and nobody seems to work, which is a hang after {most:.0f} s: {groups[0]}"
    own = next(group for group in groups if rank in group.ranks)
    where = f", {own.doing}" if own.doing else ""
    return f"{silent}, but rank {rank} works{where}: no hang{'' if most == math.inf else f' before {most:.0f} s'}"
