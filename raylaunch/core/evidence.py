"""Whether a world that is silent hangs, or somebody in it works: from several looks at what its workers do.

A script that knows nothing of us may be silent for long and healthy: one rank evaluates, or all wait for a download.
So where no number of seconds was given, silence alone is no hang: how long it may last depends on what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from raylaunch.core.progress import Hang
from raylaunch.core.stacks import Stack, StackGroup, grouped, main_thread

LOOKS = 10
LOOK_SECONDS = 1.0
"""As many looks at a silent world, and the time from one to the next."""

_STILL = 2.0
_LONG = 24.0
"""How many times its limit a world may be silent where some wait for others who do nothing, and else.

Of five minutes that is ten, after which NCCL ends a collective by itself, and two hours, long after gloo does.
"""
_CPU = 0.02
"""Of one core: more is work. Libraries that watch a process from within it take less."""
_BYTES = 64 * 1024
"""Read and written in a second: more is work."""
_WAKES = 3
"""Each look wakes a worker that waits, once. One that is woken more often waits for one thing after another."""


class Doing(StrEnum):
    """What a worker was seen doing."""

    STOPPED = "is stopped"
    WAITS = "waits for others"
    STANDS = "waits for data, a disk or others, and nothing comes"
    RESTS = "does nothing"
    SPINS = "takes CPU, at one place"
    WORKS = "works"


_AT_WORK = frozenset({Doing.SPINS, Doing.WORKS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What workers were doing at one time: those who could answer in time."""

    at: float
    stacks: tuple[Stack, ...]


def seen(looks: Sequence[Look], ranks: Iterable[int]) -> dict[int, Doing]:
    """What each of these ranks was doing, by all looks."""
    own: dict[int, list[tuple[float, Stack]]] = {rank: [] for rank in ranks}
    for look in looks:
        for stack in look.stacks:
            own.setdefault(stack.rank, []).append((look.at, stack))
    return {rank: _doing(rank, views) for rank, views in sorted(own.items())}


def _doing(rank: int, views: Sequence[tuple[float, Stack]]) -> Doing:
    if not views:
        return Doing.RESTS  # its node does not answer: nothing speaks for it
    if all(stack.is_stopped for _, stack in views):
        return Doing.STOPPED
    places = {main_thread(text) for text in {stack.text for _, stack in views}} - {()}
    if len(places) > 1:
        return Doing.WORKS
    (since, first), (until, last) = views[0], views[-1]
    (group,) = grouped([last], (rank,))
    spent = last.effort - first.effort
    if group.in_collective:  # which may burn CPU, and nothing comes of it
        return Doing.WORKS if spent.wakes > _WAKES * (len(views) - 1) else Doing.WAITS
    seconds = max(until - since, LOOK_SECONDS)
    if spent.cpu_of_others > _CPU * seconds or spent.bytes > _BYTES * seconds:
        return Doing.WORKS
    if spent.cpu > _CPU * seconds:  # a long call; or a wait for a GPU, which may wait for others
        return Doing.SPINS
    if group.in_backward:
        return Doing.WAITS
    return Doing.STANDS if group.waits or group.loads_data else Doing.RESTS


def longest(hang: Hang, doing: Mapping[int, Doing], times_here: int = 0) -> float:
    """Seconds that the world may be silent; 0: it hangs. `times_here`: it was ended at this place before.

    What was restarted at one place again and again may only be slow there, and would never get past it.
    """
    many = _limits(hang, set(doing.values()))
    return 0.0 if many <= 1 else hang.limit * many * 2.0**times_here


def patience(hang: Hang, most: float) -> float:
    """Seconds before it is to be looked at again, where it may be silent for so long; 0: it hangs."""
    silent = hang.seconds if hang.goes_on else hang.quiet
    return max(0.0, min(most - silent, max(silent, hang.limit)))


def _limits(hang: Hang, kinds: AbstractSet[Doing]) -> float:
    """How many times its limit the world may be silent; 1: no more."""
    if Doing.STOPPED in kinds:
        return 1.0
    if hang.goes_on:
        return math.inf
    if kinds == {Doing.WAITS}:
        return 1.0
    if hang.is_young or kinds == {Doing.WORKS}:
        return math.inf
    # Where all rest, they may wait for more to do.
    return _STILL if not kinds & _AT_WORK and kinds != {Doing.RESTS} else _LONG


def told(hang: Hang, doing: Mapping[int, Doing], groups: Sequence[StackGroup], most: float) -> str:
    """A line for a person, of a silence that is no hang as yet. `groups`: the odd ones first."""
    silent = f"no step for {hang.quiet:.0f} s"
    rank = next((rank for rank, what in doing.items() if what in _AT_WORK), None)
    if rank is None:
        return f"{silent}, and nobody seems to work, which is a hang after {most:.0f} s: {groups[0]}"
    own = next(group for group in groups if rank in group.ranks)
    where = f", {own.doing}" if own.doing else ""
    return f"{silent}, but rank {rank} works{where}: no hang{'' if most == math.inf else f' before {most:.0f} s'}"
