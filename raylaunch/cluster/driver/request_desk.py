"""What people request of a run while it lasts: taken in any thread, handled and answered in the driver's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.probes.hang_probe import StackProbe
from raylaunch.core.failures.stacks import Stack, StackGroup, grouped
from raylaunch.core.machine.events_and_actions import Event, NodeDraining, RequestEvent
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import HostId, NodeId, RunTime
from raylaunch.core.placement.environment import natural_key
from raylaunch.node.protocol.messages import Order, StacksDumped

NO_DEADLINE = 1e9
"""Seconds from a person's drain until the node is taken away: whoever drains it waits until the run has left it."""
_MOST_NAMED = 8
_MOST_NAME = 100


class RequestRefusedError(Exception):
    """A request that cannot be carried out now; why, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAccepted:
    """What the run does after a request."""

    attempt: int
    """The present or last attempt when the request came."""
    phase: Phase
    """The phase that follows from it."""
    status: str
    """What the run does and why, for a person."""
    can_save: bool = True
    """Whether the workers can save at a step that is agreed, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedStacks:
    """What all workers of an attempt were doing at one moment."""

    attempt: int
    groups: tuple[StackGroup, ...]
    stacks: tuple[Stack, ...]
    """By rank."""


Events = Sequence[RequestEvent | NodeDraining]


@dataclass(frozen=True, slots=True, eq=False)
class PersonRequest:
    """A request in the driver's inbox. `answer` gets a `RequestRefusedError` if it is refused."""

    make: Callable[[RunTime], Events]
    answer: Future[RequestAccepted]


@dataclass(frozen=True, slots=True, eq=False)
class StacksRequest:
    """A request in the driver's inbox for the stacks of all workers."""

    answer: Future[CollectedStacks]


Requested = PersonRequest | StacksRequest


class RequestDesk:
    """Requests and their answers. Any thread may call `event`, `drain`, `check` and `stacks`: they only enqueue.

    What they return is completed in the driver's thread, with a `RequestRefusedError` if the request is refused.
    """

    def __init__(
        self,
        machine: Machine,
        monitor: ProgressMonitor,
        send: Callable[[NodeId, Order], None],
        put: Callable[[Requested], None],
    ) -> None:
        """`send` sends an order to a node. `put` puts a request into the driver's inbox."""
        self._machine = machine
        self._monitor = monitor
        self._send = send
        self._put = put
        self._probe: StackProbe | None = None
        #: Those who wait for the probe.
        self._asking: list[Future[CollectedStacks]] = []

    # In any thread.

    def event(self, make: Callable[[RunTime], RequestEvent]) -> Future[RequestAccepted]:
        """Let the machine handle an event, which is made with its time."""
        request = PersonRequest(lambda at: [make(at)], Future())
        self._put(request)
        return request.answer

    def drain(self, name: str, by: str, hosts: frozenset[HostId] | None = None) -> Future[RequestAccepted]:
        """Leave the host of a node for good. `name`: the node's name, or its host's address.

        `hosts`: all on which there may be nodes; None: that is not known, or there may be more of them later.
        """
        request = PersonRequest(lambda at: self._drains(name, by, at, hosts), Future())
        self._put(request)
        return request.answer

    def check(self) -> Future[RequestAccepted]:
        """Tell where the run is and whether its workers can save, and change nothing."""
        request = PersonRequest(lambda _: [], Future())
        self._put(request)
        return request.answer

    def stacks(self) -> Future[CollectedStacks]:
        """Collect the stacks of all workers."""
        request = StacksRequest(Future())
        self._put(request)
        return request.answer

    # In the driver's thread.

    def events(self, request: Requested, now: RunTime) -> Iterator[Event]:
        """Yield the events of a request. It is answered when the last of them is handled."""
        if isinstance(request, StacksRequest):
            self._collect(request.answer, now)
            return
        try:
            events, attempt = self._possible(request.make(now)), self._machine.attempt
            can_save = self._monitor.can_save
        except RequestRefusedError as refused:
            request.answer.set_exception(refused)
            return
        yield from events
        machine, status = self._machine, self._machine.status
        if len(drained := [event.node for event in events if isinstance(event, NodeDraining)]) > 1:
            status = f"{status}; on that host are {', '.join(drained)}, which are all drained"
        request.answer.set_result(
            RequestAccepted(attempt=attempt, phase=machine.phase, status=status, can_save=can_save)
        )

    def _possible(self, events: Events) -> Events:
        for event in events:
            if why := self._machine.refusal(event):
                raise RequestRefusedError(why)
        return events

    def _drains(self, name: str, by: str, at: RunTime, hosts: frozenset[HostId] | None) -> Events:
        nodes = self._machine.nodes
        named = [node for node, member in nodes.items() if name in (node, member.address)]
        if not named:
            there = sorted(nodes, key=natural_key)
            more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
            names = ", ".join(f"{node} ({nodes[node].address})" for node in there[:_MOST_NAMED]) or "none"
            msg = f"the run has no node {name[:_MOST_NAME]}: there are {names}{more}"
            raise RequestRefusedError(msg)
        host = nodes[named[0]].host
        if host == local_machine.HOST_ID:
            msg = "the run is on this machine alone, and cannot leave it"
            raise RequestRefusedError(msg)
        if all(nodes[node].draining for node in named):
            msg = f"{named[0]} is being drained already"
            raise RequestRefusedError(msg)
        affected = self._machine.members.on_host(host) if host else named
        left = {member.host for member in nodes.values() if member.draining} | {host}
        staying = [node for node, member in nodes.items() if member.host not in left]
        if hosts is not None and hosts <= left and len(staying) < self._machine.job.min_nodes:
            raise RequestRefusedError(self._why_not_left(named, affected))
        deadline, why = RunTime(at + NO_DEADLINE), f"{by} requested it"
        return [NodeDraining(at=at, node=node, deadline=deadline, why=why, by=by) for node in affected]

    def _why_not_left(self, named: Sequence[NodeId], affected: Sequence[NodeId]) -> str:
        """Return why the run cannot leave the host of some nodes, where the cluster has no other one."""
        why = f"the cluster has no other host that could take the place of {named[0]}"
        others = [node for node in affected if node not in named]
        if not others:
            return why
        verb = "is" if len(others) == 1 else "are"
        why = f"{why}, and {', '.join(others)} {verb} on the same host"
        fewer = len(self._machine.members) - 1
        return f"{why}: `raylaunch resize {fewer}` gives up a node" if self._machine.job.nprocs is None else why

    # Stacks.

    def _collect(self, answer: Future[CollectedStacks], now: RunTime) -> None:
        parts, machine = self._monitor.parts, self._machine
        if machine.phase in (Phase.GATHERING, Phase.DONE) or not parts or parts[0].attempt != machine.attempt:
            answer.set_exception(RequestRefusedError(f"no workers run: {machine.status}"))
            return
        self._asking.append(answer)
        if self._probe is None:
            there = [part for part in parts if part.node in machine.world.unfinished]
            self._probe = StackProbe(there or parts, self._send)
            self._probe.sample(now)

    def dumped(self, word: StacksDumped) -> None:
        """Take a node's stacks, for those who have asked for them."""
        if self._probe is not None:
            self._probe.answered(word)

    @property
    def next_check(self) -> float:
        """When `answer_due` must be called next, in seconds since the run began."""
        return math.inf if self._probe is None else self._probe.next_check

    def answer_due(self, now: RunTime) -> None:
        """Answer those who asked for stacks, if all nodes have answered, or have had the time to."""
        probe = self._probe
        if probe is None or now < probe.next_check:
            return
        groups = grouped(probe.stacks, probe.unheard_ranks)
        groups.sort(key=lambda group: (-len(group.ranks), group.ranks))
        stacks = tuple(sorted(probe.stacks, key=lambda stack: stack.rank))
        found = CollectedStacks(attempt=probe.attempt, groups=tuple(groups), stacks=stacks)
        asking, self._probe, self._asking = self._asking, None, []
        for answer in asking:
            answer.set_result(found)

    def close(self, waiting: Sequence[Requested]) -> None:
        """Refuse the requests that wait: the run is over."""
        over = RequestRefusedError(f"the run has ended: {self._machine.status}")
        for answer in (*self._asking, *(request.answer for request in waiting)):
            answer.set_exception(over)
        self._probe, self._asking = None, []
