"""The nodes that take part in a run, and which of them make a world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd

from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member, order


class Membership:
    """The nodes that joined and were neither lost nor released."""

    def __init__(self, job: Job) -> None:
        self.set_bounds(job)
        self.nodes: dict[NodeId, Member] = {}
        #: The nodes that a new world may use: all that are not drained.
        self._usable: dict[NodeId, Member] = {}
        #: The number of usable nodes by their number of workers.
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return the number of nodes that a new world may use."""
        return len(self._usable)

    def set_bounds(self, job: Job) -> None:
        """Take the bounds of a world's size from this job from now on."""
        self._job = job
        self._min_nodes, self._max_nodes, self._multiple_of = job.min_nodes, job.max_nodes, job.multiple_of

    def add(self, member: Member) -> None:
        """Add a node that joined."""
        self.nodes[member.node] = self._usable[member.node] = member
        self._sizes[member.nproc] += 1

    def remove(self, node: NodeId) -> Member:
        """Remove a node that was lost or released."""
        self._make_unusable(node)
        return self.nodes.pop(node)

    def drain(self, node: NodeId) -> None:
        """Mark all nodes of this node's host as drained: they still run, but a new world may not use them."""
        host = self.nodes[node].host
        for each in self.on_host(host) if host else [node]:
            self.nodes[each] = replace(self.nodes[each], draining=True)
            self._make_unusable(each)

    def _make_unusable(self, node: NodeId) -> None:
        member = self._usable.pop(node, None)
        if member is None:
            return
        self._sizes[member.nproc] -= 1
        if not self._sizes[member.nproc]:
            del self._sizes[member.nproc]

    def on_host(self, host: HostId) -> list[NodeId]:
        """Return the names of all nodes of a host."""
        return [node for node, member in self.nodes.items() if member.host == host]

    def successors(self, members: Sequence[Member]) -> tuple[NodeId, ...]:
        """Return the names of a world's nodes. A newcomer on the same host replaces a node that is gone.

        A newcomer with as many workers then has the ranks of the lost node, and what its host's memory holds of them.
        """
        known = {member.node for member in members}
        newcomers = [member for member in self._usable.values() if member.node not in known and member.host]
        found = []
        for member in members:
            place = (member.host, member.nproc)
            heirs = [] if member.node in self.nodes else [new for new in newcomers if (new.host, new.nproc) == place]
            found.append(heirs[0].node if heirs else member.node)
            newcomers = [new for new in newcomers if new not in heirs[:1]]
        return tuple(found)

    def choose(self, survivors: Sequence[NodeId], *, last: Collection[HostId] = ()) -> tuple[Member, ...]:
        """Return the largest possible world in rank order; empty if it would be too small.

        Survivors of the last world keep their order. Nodes of hosts in `last` are chosen only if there are no others.
        """
        found = order(self._usable.values(), survivors)
        preferred = sorted(found, key=lambda member: member.host in last) if last else found
        chosen = self._fitting(preferred) or self._fitting(order(found, ()))
        return order(chosen, survivors)

    def _fitting(self, preferred: Sequence[Member]) -> Sequence[Member]:
        most = preferred[: self._max_nodes]
        chosen = fitting(most, self._multiple_of) if self._multiple_of > 1 else most
        return chosen if len(chosen) >= self._min_nodes else ()

    @property
    def enough(self) -> bool:
        """Whether a world is possible."""
        if len(self) < self._min_nodes or self._multiple_of == 1:
            return len(self) >= self._min_nodes
        if len(self) > self._max_nodes:
            return bool(self.choose(()))
        return len(self) - surplus(self._sizes, self._multiple_of).total() >= self._min_nodes

    def enough_without(self, host: HostId) -> bool:
        """Whether a world is possible without the nodes of this host."""
        others = [member for member in self._usable.values() if member.host != host]
        return self.enough if len(others) == len(self) else _are_enough(self._job, others)

    def enough_within(self, job: Job) -> bool:
        """Whether a world is possible within the bounds of this job."""
        return _are_enough(job, self._usable.values())


def _are_enough(job: Job, members: Iterable[Member]) -> bool:
    membership = Membership(job)
    for member in members:
        membership.add(member)
    return membership.enough


def fitting(members: Sequence[Member], multiple_of: int) -> Sequence[Member]:
    """Omit as few workers as possible, from the end, so that the rest is a multiple of that number."""
    too_many = surplus(Counter(member.nproc for member in members), multiple_of)
    kept = []
    for member in reversed(members):
        if too_many[member.nproc] > 0:
            too_many[member.nproc] -= 1
        else:
            kept.append(member)
    return kept[::-1]


def surplus(sizes: Mapping[int, int], multiple_of: int) -> Counter[int]:
    """Return how many nodes of each size to omit: as few workers as possible, then as few nodes.

    `sizes` has the number of nodes by their number of workers.
    """
    wanted = sum(nproc * nodes for nproc, nodes in sizes.items()) % multiple_of
    #: By omitted workers modulo the multiple: (omitted workers, omitted nodes, their sizes). A knapsack table.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for nproc, there in sorted(sizes.items()):
        useful = min(there, multiple_of // gcd(multiple_of, nproc) - 1)
        for gone, (workers, nodes, which) in list(best.items()):
            for more in range(1, useful + 1):
                reached = (gone + more * nproc) % multiple_of
                found = (workers + more * nproc, nodes + more, (*which, *[nproc] * more))
                best[reached] = min(best.get(reached, found), found)
    return Counter(best[wanted][2])
