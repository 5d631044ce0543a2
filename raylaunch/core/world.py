"""Which nodes make up a world: those that are there, as many as the job takes, in an order that survives restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd

from raylaunch.core.job import Job
from raylaunch.core.ranks import Member, order


class Members:
    """All and only the nodes that joined and were neither lost nor given up."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._least, self._most, self._multiple_of = job.min_nodes, job.max_nodes, job.multiple_of
        self.nodes: dict[str, Member] = {}
        #: Those that a new world may count on.
        self._usable: dict[str, Member] = {}
        #: How many of those have so many workers.
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many a new world may count on."""
        return len(self._usable)

    def add(self, member: Member) -> None:
        """A node joined."""
        self.nodes[member.node] = self._usable[member.node] = member
        self._sizes[member.nproc] += 1

    def remove(self, node: str) -> Member:
        """A node was lost or given up."""
        self._unusable(node)
        return self.nodes.pop(node)

    def drain(self, node: str) -> None:
        """It still runs, as do all nodes of its host, but they are no capacity any more."""
        host = self.nodes[node].host
        for each in self.on(host) if host else [node]:
            self.nodes[each] = replace(self.nodes[each], draining=True)
            self._unusable(each)

    def _unusable(self, node: str) -> None:
        member = self._usable.pop(node, None)
        if member is None:
            return
        self._sizes[member.nproc] -= 1
        if not self._sizes[member.nproc]:
            del self._sizes[member.nproc]

    def on(self, host: str) -> list[str]:
        """All nodes of a host."""
        return [node for node, member in self.nodes.items() if member.host == host]

    def choose(self, survivors: Sequence[str], *, last: Collection[str] = ()) -> tuple[Member, ...]:
        """The largest world that can be had, in rank order; empty where that is not enough.

        Nodes of the `last` hosts come in only where there is nobody else.
        """
        found = order(self._usable.values(), survivors)
        preferred = sorted(found, key=lambda member: member.host in last) if last else found
        chosen = self._fitting(preferred) or self._fitting(order(found, ()))
        return order(chosen, survivors)

    def _fitting(self, preferred: Sequence[Member]) -> Sequence[Member]:
        most = preferred[: self._most]
        chosen = fitting(most, self._multiple_of) if self._multiple_of > 1 else most
        return chosen if len(chosen) >= self._least else ()

    @property
    def enough(self) -> bool:
        """Whether there is a world to be had."""
        if len(self) < self._least or self._multiple_of == 1:
            return len(self) >= self._least
        if len(self) > self._most:
            return bool(self.choose(()))
        return len(self) - surplus(self._sizes, self._multiple_of).total() >= self._least

    def enough_without(self, host: str) -> bool:
        """Whether there is one to be had without any node of a host."""
        others = [member for member in self._usable.values() if member.host != host]
        if len(others) == len(self):
            return self.enough
        rest = Members(self._job)
        for member in others:
            rest.add(member)
        return rest.enough


def fitting(members: Sequence[Member], multiple_of: int) -> Sequence[Member]:
    """The members less as few workers as must go for a multiple of that number, from the end."""
    too_many = surplus(Counter(member.nproc for member in members), multiple_of)
    kept = []
    for member in reversed(members):
        if too_many[member.nproc] > 0:
            too_many[member.nproc] -= 1
        else:
            kept.append(member)
    return kept[::-1]


def surplus(sizes: Mapping[int, int], multiple_of: int) -> Counter[int]:
    """How many nodes of each size must go: as few workers as possible, then as few nodes."""
    wanted = sum(nproc * nodes for nproc, nodes in sizes.items()) % multiple_of
    #: By what goes, modulo the multiple: how many workers that are, how many nodes, and of which sizes.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for nproc, there in sorted(sizes.items()):
        useful = min(there, multiple_of // gcd(multiple_of, nproc) - 1)
        for gone, (workers, nodes, which) in list(best.items()):
            for more in range(1, useful + 1):
                reached = (gone + more * nproc) % multiple_of
                found = (workers + more * nproc, nodes + more, (*which, *[nproc] * more))
                best[reached] = min(best.get(reached, found), found)
    return Counter(best[wanted][2])
