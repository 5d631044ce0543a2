"""The commits of the scripts' `State`, as nodes hold them in memory, and the choice of the one to restore.

A commit is complete if every rank of the world has it. Its ranks belong together only if they were written in the same
attempt: after a restart, training may take another course.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raylaunch.core.text import count

_MOST_NAMED = 4
"""The most ranks that a message names."""


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """Identifies a commit. Those of a later attempt are newer, since an attempt continues from what was chosen for it.

    Not keyword-only: the order of the fields is the order of commits.
    """

    attempt: int
    """In which it was written."""
    steps: int
    """How many steps were completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCommit:
    """One rank's part of a commit, whole, in the memory of a node."""

    rank: int
    world_size: int
    """Of the world in which it was written."""
    commit: Commit


def newest_complete(held: Iterable[HeldCommit], world_size: int) -> Commit | None:
    """Return the newest commit of a world of this size that each of its ranks has; None: there is none."""
    ranks: defaultdict[Commit, set[int]] = defaultdict(set)
    for one in held:
        if one.world_size == world_size and 0 <= one.rank < world_size:
            ranks[one.commit].add(one.rank)
    return max((commit for commit, found in ranks.items() if len(found) == world_size), default=None)


def reason(held: Collection[HeldCommit], world_size: int, chosen: Commit | None) -> str:
    """Return why this commit was chosen of those that are held, for a person."""
    if chosen is not None:
        return f"the state after {count(chosen.steps, 'step')} is restored from memory"
    newest = max(held, key=lambda one: one.commit)
    what = f"the state after {count(newest.commit.steps, 'step')} cannot be restored from memory"
    if newest.world_size != world_size:
        return f"{what}: it is that of {count(newest.world_size, 'worker')}, and there are {world_size} now"
    having = {one.rank for one in held if one.commit == newest.commit and one.world_size == world_size}
    missing = [rank for rank in range(world_size) if rank not in having]
    names = ", ".join(map(str, missing[:_MOST_NAMED]))
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{what}: the nodes that are left do not have the part of rank {names}{more}"
