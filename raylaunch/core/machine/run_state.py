"""The state of one run: what the functions of this package read, and change as they decide.

`Run` has questions about the state, and the three steps of which every transition is made: enter a phase, set the
timer, finish. Its `Membership` has the nodes that take part, and chooses which make the next world.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Action, Finish, SetTimer
from raylaunch.core.machine.restart_policy import NEEDED_EXCLUSION, CrashLoopBackoff, HostHealth, RestartBudget
from raylaunch.core.machine.save_time import STOP_MARGIN, Deadline, Timing
from raylaunch.core.machine.state import (
    TRANSITIONS,
    Done,
    Gathering,
    Phase,
    Saving,
    State,
    Stopping,
    World,
)
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member, order
from raylaunch.core.text import count


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


@dataclass(slots=True)
class Reachability:
    """What is known of whether the nodes of a run can connect to each other."""

    proven: bool = False
    """Whether any attempt has made a step."""
    broken_since: float | None = None
    """Since when nodes that cannot reach each other have all been needed. None: not since the latest step."""


class Run:
    """The state of one run."""

    def __init__(self, job: Job) -> None:
        #: The job as it was started.
        self.started_as = job
        #: The job with the bounds that hold now.
        self.job = job
        self.now = 0.0
        #: The present phase and its data.
        self.state: State = Gathering(status="waiting for nodes", deadline=job.placement_timeout)
        #: The present attempt, or the last one while there is none.
        self.world = World()
        self.members = Membership(job)
        self.budget = RestartBudget(job.max_restarts)
        self.health = HostHealth(job.exclude_after, needed_exclusion=min(NEEDED_EXCLUSION, job.join_timeout / 2))
        self.crashes = CrashLoopBackoff()
        #: The least number of nodes that was requested. `job.min_nodes` is less until as many nodes have been there.
        self.wanted_nodes = job.min_nodes
        self.reachability = Reachability()
        self.timing = Timing()

    # Questions

    @property
    def phase(self) -> Phase:
        """The phase that the machine is in."""
        return self.state.phase

    @property
    def nodes(self) -> dict[NodeId, Member]:
        """All nodes that joined and were neither lost nor released, by name."""
        return self.members.nodes

    @property
    def leaving(self) -> frozenset[NodeId]:
        """The nodes that are drained and, while all save for the next world, the nodes that it does not have."""
        drained = frozenset(node for node, member in self.nodes.items() if member.draining)
        if not isinstance(self.state, Saving) or self.state.ending is not None or not self.members.enough:
            return drained
        return drained | self.world.nodes - {member.node for member in self.chosen_next()}

    @property
    def is_ending(self) -> bool:
        """Whether the run ends as soon as its workers have."""
        return isinstance(self.state, Saving | Stopping) and self.state.ending is not None

    @property
    def is_resized(self) -> bool:
        """Whether a person has requested other bounds than the job had."""
        return self.job is not self.started_as

    @property
    def some_can_stay(self) -> bool:
        """Whether workers of this world can stay in the next one, if it began now."""
        return self.members.enough and bool(self.world.staying_in(self.chosen_next()))

    @property
    def workers_and_nodes(self) -> str:
        """The size of the world, for a person."""
        return f"{count(self.world.size, 'worker')} on {count(len(self.world.roster), 'node')}"

    def chosen_next(self) -> tuple[Member, ...]:
        """Return the nodes of the next world, if it began now. Nodes with copies of the last commit come first."""
        survivors = (*self.members.successors(self.world.members), *self.world.replacements)
        return self.members.choose(survivors, last=self.health.doubtful)

    def present_nodes(self) -> tuple[NodeId, ...]:
        """Return the nodes of the world that are still members, in rank order."""
        nodes = self.nodes
        return tuple(node for node in self.world.roster if node in nodes)

    @property
    def seconds_left(self) -> float:
        """How long the workers may still run before the run must be over, or a node of the world is taken away."""
        ends = [each.at for each in (self.timing.deadline, self.world.deadline) if each is not None]
        return max(0.0, min(ends, default=math.inf) - self.now - 1.0)

    def latest_save(self, deadline: Deadline) -> float:
        """Return when to ask the workers to save, so that they are gone by then."""
        least = self.job.shutdown_timeout
        return deadline.latest(self.timing.save.expected(deadline, least) + least + STOP_MARGIN)

    @property
    def end_at(self) -> float | None:
        """When to begin to end the run, so that it is over in time; None: never, or that has begun."""
        return None if self.timing.deadline is None or self.is_ending else self.latest_save(self.timing.deadline)

    def is_due(self, at: float | None) -> bool:
        """Return whether this time has come. None: it never does."""
        return at is not None and self.now >= at

    # Changes

    def set_bounds(self, low: int, high: int) -> None:
        """Take these bounds of the number of nodes from now on."""
        self.job = replace(self.job, nnodes=f"{low}:{high}")
        self.members.set_bounds(self.job)

    def enter(self, state: State) -> None:
        """Enter a phase, which the table of transitions must allow."""
        assert state.phase in TRANSITIONS[self.phase], f"{state.phase} cannot follow {self.phase}"
        self.state = state

    def finish(self, exit_code: int, why: str) -> list[Action]:
        """End the run."""
        self.enter(Done(status=why, exit_code=exit_code))
        return [Finish(exit_code=exit_code, why=why)]

    def set_timer(self, why: str) -> list[Action]:
        """Ask for a `Tick` at the earliest time that matters, unless that was done already."""
        times = (*self.state.timers, self.health.next_end, self.end_at)
        nearest = min((at for at in times if at is not None), default=None)
        if nearest is None or nearest == self.timing.timer_at:
            return []
        self.timing.timer_at = nearest
        return [SetTimer(at=max(nearest, self.now), why=why)]
