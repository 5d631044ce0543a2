"""What torch's Flight Recorder says of the collectives of ranks that stand still: which one is missing, and on whom.

A kernel of NCCL waits on the GPU, where no stack shows it. The recorder counts the collectives that each rank has
called in each of its process groups, and those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raylaunch.core.text import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives of one rank in one process group."""

    group: str
    """Its name, such as `default_pg`."""
    called: int
    """The number of the last one that the rank has called."""
    ended: int
    """The number of the last one that has ended on it; those before have."""
    waits_in: str = ""
    """The name of the next one, such as `all_reduce`; "": it was not called."""


@dataclass(frozen=True, slots=True)
class MissingCall:
    """A collective that has not ended."""

    ranks: frozenset[int]
    """Those that have not called it; empty if all have."""
    text: str
    """For a person."""


def missing_call(calls: Mapping[int, Iterable[GroupCalls]]) -> MissingCall | None:
    """Return a collective in which ranks wait for others; None: none is known.

    A rank that waits elsewhere itself is not taken for the one that is waited for, if there is another.
    """
    groups: dict[str, dict[int, GroupCalls]] = {}
    for rank, own in calls.items():
        for each in own:
            groups.setdefault(each.group, {})[rank] = each
    waiting = {rank for rank, own in calls.items() if any(each.waits_in for each in own)}
    found = [call for name, members in groups.items() if (call := _missing_in(name, members)) is not None]
    return min(found, key=lambda call: (not call.ranks, not call.ranks.isdisjoint(waiting)), default=None)


def _missing_in(group: str, members: Mapping[int, GroupCalls]) -> MissingCall | None:
    waiting = {rank: each for rank, each in members.items() if each.waits_in}
    if not waiting:
        return None
    number = min(each.ended for each in waiting.values()) + 1
    inside = [rank for rank, each in waiting.items() if each.ended + 1 == number]
    name = waiting[inside[0]].waits_in
    absent = frozenset(rank for rank, each in members.items() if each.called < number)
    if absent:
        who, others = (f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}" for ranks in (absent, inside))
        has, wait = "have" if len(absent) > 1 else "has", "wait" if len(inside) > 1 else "waits"
        text = f"{who} {has} not called {name}, number {number} of {group}, in which {others} {wait}"
        return MissingCall(absent, text)
    return MissingCall(absent, f"all ranks have called {name}, number {number} of {group}, and it does not end")
