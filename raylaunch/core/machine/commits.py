"""The commits of the scripts' `State`, as nodes hold them in memory, and the choice of the one to restore.

A commit is complete if every rank of the world in which it was written has it. Its parts belong together only if they
were written in the same attempt: after a restart, training may take another course.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.devices import GpuUse
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


@dataclass(slots=True, kw_only=True)
class KnownCommits:
    """What one attempt leaves to the next about commits."""

    uses_state: bool = False
    """Whether the script uses `State`."""
    counted_loss: Commit | None = None
    """The newest commit that was lost in part, and counted as lost already."""
    orphaned: dict[NodeId, tuple[HeldCommit, ...]] = field(default_factory=dict)
    """By lost node: what can still be fetched from its subreaper."""
    tries: int = 0
    """How many attempts in a row have fetched such parts, and made no step."""


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
class CommitRate:
    """How often `State` commits with `every="auto"`, and why. Measured by rank 0."""

    every: int
    """In steps."""
    commit_seconds: float
    """How long a commit takes."""
    step_seconds: float
    """How long a step takes without commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What a node holds in memory for the script, besides its workers' own memory, in bytes, and its workers' GPUs."""

    node: NodeId
    own: int
    """The buffers in which its own ranks commit their `State`."""
    copies: int
    """Copies of what ranks of other hosts have committed, or have written to RAYLAUNCH_FAST_DIR."""
    files: int = 0
    """Files that its own ranks have in RAYLAUNCH_FAST_DIR."""
    disk_seconds: float = 0.0
    """How long the slowest of its checkpoints in the durable folder took; 0: it has written none."""
    gpus: tuple[GpuUse, ...] = ()
    """Those of its workers, where the driver of NVIDIA says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFetch:
    """A node is to fetch one part of the commit to restore from another node."""

    node: NodeId
    part: int
    """The rank that has written it."""
    source: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCommit:
    """Tell the attempt's workers on these nodes which commit their `State` restores; None: none. There is no answer."""

    attempt: int
    nodes: tuple[NodeId, ...]
    commit: Commit | None
    why: str
    world_size: int = 0
    """Workers in the world in which the commit was written; 0: there is no commit."""
    kept: Commit | None = None
    """What no node may free until a newer commit is on two hosts; None: the world has one host only."""
    fetches: tuple[PartFetch, ...] = ()
    """Which nodes fetch which parts from which others before they tell their workers."""
    lost_steps: int = 0
    """Steps at most that were committed after it, and are lost with a host."""


def fetches(
    held: Mapping[NodeId, Collection[HeldCommit]],
    needed: Mapping[NodeId, Collection[int]],
    chosen: CompleteCommit,
    *,
    last: Collection[NodeId] = (),
) -> tuple[PartFetch, ...]:
    """Return which node fetches what: each part that it needs and lacks, from the node that gives the fewest parts.

    Nodes in `last` give only what no other node has.
    """
    holders: defaultdict[int, list[NodeId]] = defaultdict(list)
    for node, parts in held.items():
        for one in dict.fromkeys(one.rank for one in parts if chosen.has(one)):
            holders[one].append(node)
    given: Counter[NodeId] = Counter()
    found = []
    for node, parts_needed in needed.items():
        for part in parts_needed:
            if node not in holders[part]:
                source = min(holders[part], key=lambda holder: (holder in last, given[holder]))
                given[source] += 1
                found.append(PartFetch(node=node, part=part, source=source))
    return tuple(found)


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


def newest_of(held: Iterable[HeldCommit]) -> HeldCommit:
    """Return one of the parts of the newest commit, whether or not it is complete."""
    return max(held, key=lambda one: one.commit)


def lost_steps(held: Collection[HeldCommit], chosen: CompleteCommit) -> int:
    """Return how many committed steps are lost at most, since a host is gone that had them, and no copy is as new.

    A rank of which nothing is left but copies had its part of the newest commit too, or was about to.
    """
    newest = newest_of(held)
    own = {one.rank for one in held if not one.copied and one.world_size == newest.world_size}
    if newest.commit <= chosen.commit or own >= set(range(newest.world_size)):
        return 0
    return max(0, newest.commit.steps - chosen.commit.steps)


def reason(held: Collection[HeldCommit], chosen: CompleteCommit | None, lost: int = 0) -> str:
    """Return why this commit was chosen among the held ones, for a person. `lost`: how many steps are lost."""
    if chosen is not None:
        more = f"; {count(lost, 'more step')} had no copy on another host, and must be done again" if lost else ""
        return f"the state after {count(chosen.commit.steps, 'step')} is restored from memory{more}"
    newest = newest_of([one for one in held if not one.light] or held)
    what = f"the state after {count(newest.commit.steps, 'step')} cannot be restored from memory"
    having = {one.rank for one in held if (one.commit, one.world_size) == (newest.commit, newest.world_size)}
    missing = [rank for rank in range(newest.world_size) if rank not in having]
    if not missing:
        return f"{what}: parameters that DistributedDataParallel keeps equal differed between the ranks"
    names = ", ".join(map(str, missing[:_MOST_NAMED]))
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{what}: the nodes that are left do not have the part of rank {names}{more}"
