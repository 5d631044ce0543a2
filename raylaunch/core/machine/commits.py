"""The commits of the scripts' `State`, as nodes hold them in memory, and the choice of the one to restore.

A commit is complete if every rank of the world in which it was written has it. Its parts belong together only if they
were written in the same attempt: after a restart, training may take another course.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raylaunch.core.newtypes import NO_HOST, HostId, NodeId
from raylaunch.core.text import count

_MOST_NAMED = 4
"""The most ranks that a message names."""


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """Identifies a commit. A later attempt's commit is newer, since an attempt continues from the one chosen for it.

    Not keyword-only: the order of the fields is the order of commits.
    """

    attempt: int
    """The attempt in which it was written."""
    steps: int
    """How many steps were completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCommit:
    """One rank's part of a commit, whole, in the memory of a node."""

    rank: int
    world_size: int
    """Workers in the world in which it was written."""
    commit: Commit
    replicated: bool = False
    """Whether the parts of all ranks have the same tensors, so that one of them is enough for any rank."""
    copied: bool = False
    """Whether another node's rank wrote it, or an earlier agent's: it was copied to the node that has it."""
    first_sharer: int = 0
    sharers: int = 0
    """The ranks of a node, from `first_sharer` on, each of whose parts has a share of the tensors that are equal on all
    ranks. 0: the part has all of its tensors.
    """
    digest: int = 0
    """Digest of the tensors that should be equal on all ranks: they were not if the parts of a commit differ in it."""
    light: bool = False
    """Whether the part has nothing of the tensors that are equal on all ranks. The parts of such a commit are complete
    if one of them is not light, and has all of these tensors: a survivor has written it when others had died.
    """

    @property
    def sharing(self) -> range:
        """The ranks whose parts are needed to put together what this one has only a share of; empty: none."""
        return range(self.first_sharer, self.first_sharer + self.sharers)

    @property
    def shares_alone(self) -> bool:
        """Whether the part has all of the tensors that are equal on all ranks, as one that a survivor has completed."""
        return not self.light and self.sharing == range(self.rank, self.rank + 1)


@dataclass(frozen=True, slots=True, order=True)
class CompleteCommit:
    """A commit of which every rank's part is held. Not keyword-only, as `Commit`."""

    commit: Commit
    world_size: int
    """Workers in the world in which it was written: it has the parts 0 to `world_size` - 1."""
    replicated: bool = False
    """As in `HeldCommit`, of all parts."""
    sharing: Mapping[int, range] = field(default_factory=dict, compare=False)
    """By rank, as in `HeldCommit`; without the ranks that share nothing."""

    def has(self, one: HeldCommit) -> bool:
        """Return whether this is one of its parts. A light one is not, if the rank has written all of its part."""
        is_whole_needed = self.sharing.get(one.rank) == range(one.rank, one.rank + 1)
        return (one.commit, one.world_size) == (self.commit, self.world_size) and not (one.light and is_whole_needed)

    def parts_for(self, ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
        """Return the parts that the ranks of a node need, in a world of this size."""
        parts: Iterable[int] = range(self.world_size)
        if world_size == self.world_size:
            parts = ranks
        elif self.replicated:
            parts = {rank % self.world_size for rank in ranks}
        return tuple(sorted({one for part in parts for one in (part, *self.sharing.get(part, ()))}))


def newest_complete(held: Iterable[HeldCommit]) -> CompleteCommit | None:
    """Return the newest commit that each rank of the world in which it was written has; None: there is none."""
    found: defaultdict[tuple[Commit, int], dict[int, HeldCommit]] = defaultdict(dict)
    for one in held:
        if 0 <= one.rank < one.world_size and 0 <= one.sharing.start <= one.sharing.stop <= one.world_size:
            parts = found[one.commit, one.world_size]
            if one.rank not in parts or parts[one.rank].light:
                parts[one.rank] = one
    complete = (
        CompleteCommit(commit, size, all(one.replicated for one in parts.values()), sharing)
        for (commit, size), parts in found.items()
        if len(parts) == size
        and len({one.digest for one in parts.values()}) == 1
        and (sharing := _sharing(parts)) is not None
    )
    return max(complete, default=None)


def _sharing(parts: Mapping[int, HeldCommit]) -> dict[int, range] | None:
    """Return by rank whose parts have the tensors that are equal on all ranks; None: no part that is left has them.

    For a light part it is one that has all, if possible of the same node.
    """
    whole = [rank for rank, one in sorted(parts.items()) if one.shares_alone]
    found = {}
    for rank, one in parts.items():
        if one.light:
            if not whole:
                return None
            nearest = next((each for each in whole if each in one.sharing), whole[0])
            found[rank] = range(nearest, nearest + 1)
        elif any(parts[each].light for each in one.sharing):
            return None
        elif one.sharing:
            found[rank] = one.sharing
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAddress:
    """Where an agent gives parts of commits and files to the other agents of the run, and takes copies of theirs."""

    node: NodeId
    host: str
    port: int
    outside: bool = False
    """It has no ranks in the world, and may end at any time. If the agent was killed, its subreaper answers there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node that holds parts of commits when a world begins."""

    at: CopyAddress
    host: HostId = NO_HOST
    ranks: tuple[int, ...] = ()
    """Its ranks in the new world; empty: it is outside, and only gives what no other node has."""
    held: tuple[HeldCommit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """What the ranks of a node restore."""

    commit: Commit | None = None
    """None: nothing."""
    world_size: int = 0
    """Workers in the world in which it was written; 0: there is no commit."""
    kept: Commit | None = None
    """What must not be freed until a newer commit is on two hosts; None: the world has one host only."""
    sources: tuple[tuple[CopyAddress, tuple[int, ...]], ...] = ()
    """Where the node gets the parts that it lacks, by the ranks that have written them."""
    lost: str = ""
    """What cannot be restored of what was committed, for a person; "": nothing is lost."""


def choose(holders: Sequence[Holder], world_size: int) -> list[RestoreOrder]:
    """Choose the newest commit of which each part is somewhere, for a world of this size on those that have ranks.

    Return what each of these restores, in their order.
    """
    everything = [part for one in holders for part in one.held]
    found, world = newest_complete(everything), [one for one in holders if one.ranks]
    if found is None:
        return [RestoreOrder(lost=loss(everything, None))] * len(world)
    held, hosts = {one.at.node: one.held for one in holders}, {one.at.node: one.host for one in world}
    needed = {one.at.node: found.parts_for(one.ranks, world_size) for one in world}
    fetched = fetches(held, needed, found, last=held.keys() - hosts.keys())
    safe = safest({node: held[node] for node in hosts}, hosts) or found.commit
    addresses = {one.at.node: one.at for one in holders}
    return [
        RestoreOrder(
            commit=found.commit,
            world_size=found.world_size,
            kept=safe if len({*hosts.values()}) > 1 else None,
            sources=tuple((addresses[source], tuple(parts)) for source, parts in fetched[node].items()),
            lost=loss(everything, found),
        )
        for node in hosts
    ]


def fetches(
    held: Mapping[NodeId, Collection[HeldCommit]],
    needed: Mapping[NodeId, Collection[int]],
    chosen: CompleteCommit,
    *,
    last: Collection[NodeId] = (),
) -> dict[NodeId, dict[NodeId, list[int]]]:
    """Return what each node fetches from which: parts that it needs and lacks, each from the one that gives the fewest.

    Nodes in `last` give only what no other node has.
    """
    holders: defaultdict[int, list[NodeId]] = defaultdict(list)
    for node, parts in held.items():
        for one in dict.fromkeys(one.rank for one in parts if chosen.has(one)):
            holders[one].append(node)
    given: Counter[NodeId] = Counter()
    found: dict[NodeId, dict[NodeId, list[int]]] = {node: {} for node in needed}
    for node, parts_needed in needed.items():
        for part in parts_needed:
            if node not in holders[part]:
                source = min(holders[part], key=lambda holder: (holder in last, given[holder]))
                given[source] += 1
                found[node].setdefault(source, []).append(part)
    return found


def safest(held: Mapping[NodeId, Collection[HeldCommit]], hosts: Mapping[NodeId, HostId]) -> Commit | None:
    """Return the newest commit that no loss of a single host can destroy; None: there is none."""
    places: defaultdict[tuple[Commit, int], defaultdict[int, set[HostId]]] = defaultdict(lambda: defaultdict(set))
    for node, parts in held.items():
        for one in parts:
            if not one.light:
                places[one.commit, one.world_size][one.rank].add(hosts[node])
    safe = (
        commit
        for (commit, size), found in places.items()
        if len(found) == size and all(len(each) > 1 for each in found.values())
    )
    return max(safe, default=None)


def lost_steps(held: Collection[HeldCommit], chosen: CompleteCommit) -> int:
    """Return how many committed steps are lost at most, since a host is gone that had them, and no copy is as new.

    A rank of which nothing is left but copies had its part of the newest commit too, or was about to.
    """
    newest = max(held, key=lambda one: one.commit)
    own = {one.rank for one in held if not one.copied and one.world_size == newest.world_size}
    if newest.commit <= chosen.commit or own >= set(range(newest.world_size)):
        return 0
    return max(0, newest.commit.steps - chosen.commit.steps)


def loss(held: Collection[HeldCommit], chosen: CompleteCommit | None) -> str:
    """Return what of the held commits cannot be restored, though this one can, for a person; "": nothing is lost."""
    if not held:
        return ""
    if chosen is not None:
        lost = lost_steps(held, chosen)
        what = f"the state after {count(chosen.commit.steps, 'step')} is restored from memory"
        return f"{what}; {count(lost, 'more step')} had no copy on another host, and must be done again" if lost else ""
    newest = max([one for one in held if not one.light] or held, key=lambda one: one.commit)
    what = f"the state after {count(newest.commit.steps, 'step')} cannot be restored from memory"
    having = {one.rank for one in held if (one.commit, one.world_size) == (newest.commit, newest.world_size)}
    missing = [rank for rank in range(newest.world_size) if rank not in having]
    if not missing:
        return f"{what}: parameters that DistributedDataParallel keeps equal differed between the ranks"
    names = ", ".join(map(str, missing[:_MOST_NAMED]))
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{what}: the nodes that are left do not have the part of rank {names}{more}"
