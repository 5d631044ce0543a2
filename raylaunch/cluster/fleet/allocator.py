"""The allocator: which slots a run requests, where its agents start, and which slots it releases. No Ray and no clock.

It works as a Kubernetes controller does. Whenever something is observed (a grant, a node that came up or was lost, a
host that is drained), it compares the nodes that are wanted with the slots that exist and requests the difference.

Slots are of two sorts. Those of the gang were reserved as a whole and stay as long as any of them is needed, since Ray
cannot shrink a placement group; every other slot has a placement group of its own. When a node is lost, an agent is
started in its slot again. If each node is to have a host of its own (`spread`), another slot is requested as well,
elsewhere, and the first agent to come up is used.

Slots are numbers; nodes and hosts are names. What the allocator requests, `RayFleet` carries out with Ray, and
`LocalFleet` on this machine.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TypeVar

from raylaunch.cluster.fleet_api import Tell
from raylaunch.core.newtypes import NO_HOST, NO_NODE, HostId, NodeId
from raylaunch.core.placement.plan import Bundle, Plan
from raylaunch.node.protocol.node_spec import AgentSpec

_Answer = TypeVar("_Answer")

_STABLE_SECONDS = 60.0
"""After an agent lived this long, its death counts as the first in a row."""
_LONGEST_PAUSE = 60.0
_SLOW_SECONDS = 60.0
"""An agent that takes this long from its grant may be on a host that was cut off, which Ray may not know yet."""
_LEAST_SLOW_SECONDS = 20.0
"""New machines are slow to start their first process. A replacement in vain may make an autoscaler add a machine."""
_SLOW_FACTOR = 4
"""An agent that takes this many times as long as the slowest one so far counts as slow sooner."""
_MOST_FAILED_STARTS = 3
_MOST_PATIENCE = 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A reservation of one bundle of resources, with at most one agent. Times are the caller's clock, in seconds."""

    number: int
    kind: int
    """Which bundle: its index in `SlotTable.bundles`."""
    in_gang: bool
    """Reserved as part of the gang, which Ray grants and releases as a whole."""
    avoid: frozenset[HostId] = frozenset()
    """Hosts that were excluded when the slot was requested."""
    host: HostId = NO_HOST
    """Where the slot is, or was when last seen; `NO_HOST`: not known."""
    node: NodeId = NO_NODE
    """The node whose agent runs or starts here; `NO_NODE`: none."""
    granted_at: float = inf
    """When the grant was announced for the present agent."""
    due_since: float = inf
    """Since when the process of the present agent is to start; infinity: it has, or its slot has no host yet."""
    up_since: float | None = None
    """When the present agent came up; None: there is none, or it is starting."""
    failed: bool = False
    """An agent was lost here or is slow to start. It may still come up, but a replacement is requested as well."""
    retry_at: float = 0.0
    """No agent is started here before this time."""

    @property
    def is_up(self) -> bool:
        """Whether the agent here is a node of the run."""
        return self.up_since is not None

    @property
    def place(self) -> str:
        """The name of where agents of this slot start: its host, or the slot itself if that is not known."""
        return self.host or f"slot {self.number}"


@dataclass(frozen=True, slots=True)
class ReserveGang:
    """Reserve resources for these slots, all or nothing. `bundles`: by slot."""

    bundles: Mapping[int, Bundle]


@dataclass(frozen=True, slots=True)
class ReserveSlot:
    """Reserve resources for one slot, on none of the hosts in `avoid`."""

    slot: int
    bundle: Bundle
    avoid: frozenset[HostId]


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the agent of `node` in a slot, as soon as the slot is granted."""

    slot: int
    node: NodeId
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class AnnounceNode:
    """Tell the driver that `node` is starting on `host`."""

    node: NodeId
    host: HostId


@dataclass(frozen=True, slots=True)
class StopAgent:
    """Stop the agent of `node`. `why`: what to tell the driver if the node was announced; else `""`."""

    node: NodeId
    why: str
    never_started: bool = False
    """Whether its process has not started, and may never."""


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Release the resources of a slot, or withdraw the reservation if it is still pending."""

    slot: int


Request = ReserveGang | ReserveSlot | StartAgent | AnnounceNode | StopAgent | ReleaseSlot


class SlotTable:
    """All slots, by number and by node. Each change may leave requests, which `take_requests` returns."""

    def __init__(self, bundles: Sequence[Bundle], gang: Sequence[int]) -> None:
        """`bundles`: by kind. `gang`: the kinds of the slots that are reserved together."""
        self.bundles = bundles
        self._slots: dict[int, Slot] = {}
        self._by_node: dict[NodeId, Slot] = {}
        self._slots_made = 0
        self._nodes_made = 0
        #: Shared by all slots that were requested with an equal set: a thousand sets of a thousand hosts are too big.
        self._latest_avoid: frozenset[HostId] = frozenset()
        self._requests: list[Request] = []
        self.up_on: Counter[HostId] = Counter()
        """Nodes that are up, by host."""
        self.up_of: Counter[int] = Counter()
        """Nodes that are up, by kind."""
        for kind in gang:
            self._add(kind, in_gang=True)

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over a copy in the order of numbers, so that slots may be added and removed meanwhile."""
        return iter([*self._slots.values()])

    def __contains__(self, slot: Slot) -> bool:
        return slot.number in self._slots

    def get(self, number: int) -> Slot | None:
        """Return the slot with this number, if there is one."""
        return self._slots.get(number)

    def of(self, node: NodeId) -> Slot | None:
        """Return the slot of a node, if it has one."""
        return self._by_node.get(node)

    @property
    def gang(self) -> list[Slot]:
        """The slots of the gang."""
        return [slot for slot in self if slot.in_gang]

    def may_gang_have_moved(self) -> bool:
        """Whether slots of the gang may be on other hosts than they were: `Allocator.moved` is told where they are."""
        return any(slot.failed for slot in self.gang)

    def is_up(self, node: NodeId) -> bool:
        """Whether a node is up."""
        slot = self.of(node)
        return slot is not None and slot.is_up

    def host_of(self, node: NodeId) -> HostId:
        """Return the host of a node; `NO_HOST`: not known."""
        slot = self.of(node)
        return NO_HOST if slot is None else slot.host

    def up_nodes(self) -> list[NodeId]:
        """Return the nodes whose agents have come up and are not lost."""
        return [slot.node for slot in self if slot.is_up]

    # Changes, each with its requests.

    def reserve_gang(self) -> None:
        """Request the slots that are reserved together or not at all."""
        self._requests.append(self._gang_request())

    def reserve(self, kind: int, avoid: frozenset[HostId]) -> None:
        """Request another slot, and an agent there."""
        if avoid == self._latest_avoid:
            avoid = self._latest_avoid
        self._latest_avoid = avoid
        slot = self._add(kind, avoid=avoid)
        self._requests.append(ReserveSlot(slot.number, self.bundles[kind], avoid))
        self.start_agent(slot)

    def _add(self, kind: int, *, in_gang: bool = False, avoid: frozenset[HostId] = frozenset()) -> Slot:
        self._slots_made += 1
        slot = self._slots[self._slots_made] = Slot(number=self._slots_made, kind=kind, in_gang=in_gang, avoid=avoid)
        return slot

    def start_agent(self, slot: Slot) -> None:
        """Start an agent in an empty slot, for a node with a name that no node had before."""
        self._nodes_made += 1
        slot.node = NodeId(f"node-{self._nodes_made}")
        self._by_node[slot.node] = slot
        self._requests.append(self.start_of(slot))

    def announce(self, slot: Slot, now: float) -> None:
        """Tell the driver that the slot of a node that starts was granted."""
        slot.granted_at = slot.due_since = now
        self._requests.append(AnnounceNode(slot.node, slot.host))

    def mark_up(self, slot: Slot, now: float) -> None:
        """Record that the agent in the slot came up on the slot's host."""
        slot.up_since, slot.due_since, slot.failed = now, inf, False
        self.up_on[slot.host] += 1
        self.up_of[slot.kind] += 1

    def stop_agent(self, slot: Slot, why: str = "", *, never_started: bool = False) -> None:
        """Stop the agent in a slot, if there is one. The slot counts as failed until another one comes up in it."""
        if slot.node:
            del self._by_node[slot.node]
            self._requests.append(StopAgent(slot.node, why, never_started))
        if slot.is_up:
            self.up_on[slot.host] -= 1
            self.up_of[slot.kind] -= 1
        slot.node, slot.granted_at, slot.due_since, slot.up_since, slot.failed = NO_NODE, inf, inf, None, True

    def clear(self, slot: Slot, why: str) -> None:
        """Stop the slot's agent; release the slot unless it is one of the gang, which Ray cannot shrink."""
        self.stop_agent(slot, why if slot.granted_at < inf else "")
        if not slot.in_gang:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Release a slot in which there is no agent."""
        del self._slots[slot.number]
        self._requests.append(ReleaseSlot(slot.number))

    def take_requests(self) -> list[Request]:
        """Return the requests that were not returned before, in the order in which they must be carried out."""
        requests, self._requests = self._requests, []
        return requests

    # After a driver that had these slots.

    def unfinished(self, reserved: Collection[int], started: Collection[NodeId]) -> Iterator[Request]:
        """Yield the requests that were made and not carried out. `reserved`: slots; `started`: nodes with agents."""
        yield from [ReleaseSlot(number) for number in reserved if number not in self._slots]
        if not {slot.number for slot in self.gang} <= {*reserved}:
            yield self._gang_request()
        for slot in self:
            if not slot.in_gang and slot.number not in reserved:
                yield ReserveSlot(slot.number, self.bundles[slot.kind], slot.avoid)
            if slot.node and not slot.is_up and slot.node not in started:
                yield self.start_of(slot)

    def start_of(self, slot: Slot) -> StartAgent:
        """Return the request by which the agent in a slot is started."""
        return StartAgent(slot.number, slot.node, self.bundles[slot.kind])

    def _gang_request(self) -> ReserveGang:
        return ReserveGang({slot.number: self.bundles[slot.kind] for slot in self.gang})

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`."""
        for slot in self._slots.values():
            slot.granted_at += seconds
            slot.due_since += seconds
            slot.retry_at += seconds
            slot.up_since = None if slot.up_since is None else slot.up_since + seconds


@dataclass(slots=True)
class _HostFilter:
    """Which hosts may get a node: none on which it is not wanted, and where nodes are spread, none that has one."""

    slots: SlotTable
    spread: bool
    draining: frozenset[HostId] = frozenset()
    cordoned: frozenset[HostId] = frozenset()
    cut_off: dict[HostId, float] = field(default_factory=dict)
    """Hosts of silent nodes, with the time until which Ray may not know of it."""

    @property
    def unusable(self) -> frozenset[HostId]:
        """Hosts whose nodes are to be replaced."""
        return self.draining | self.cordoned

    def is_occupied(self, slot: Slot) -> bool:
        """Whether the slot's host has another node, and each is to have a host of its own."""
        return self.spread and self.slots.up_on[slot.host] > slot.is_up

    def is_unwanted(self, slot: Slot) -> bool:
        """Whether no node is wanted on the slot's host."""
        return slot.host in self.unusable or self.is_occupied(slot)

    def is_hopeful(self, slot: Slot) -> bool:
        """Whether to count on the slot. Where an agent was lost, its host may be gone."""
        return not self.is_unwanted(slot) and not (slot.failed and self.spread and slot.host)

    def to_avoid(self, kind: int) -> frozenset[HostId]:
        """Return the hosts that a slot requested now is to be kept off."""
        avoid = self.cordoned.union(self.slots.bundles[kind].avoid)
        if self.spread:
            avoid = avoid.union(self.cut_off, (slot.host for slot in self.slots if slot.host))
        return avoid


class Backoff:
    """Start and death times of all agents of a run. A place is a host, or a slot whose host is not known."""

    def __init__(self, start_timeout: float = inf) -> None:
        """`start_timeout`: seconds from the grant of a slot in which the process of its agent should have started."""
        self._start_timeout = start_timeout
        #: Agents in a row whose processes were not started, by place.
        self._unstarted: Counter[str] = Counter()
        self._slowest_start: float | None = None
        #: Deaths in a row, by place.
        self._deaths: Counter[str] = Counter()
        self._failed_starts = 0
        self._any_came_up = False

    def started(self, seconds: float) -> None:
        """Record that an agent started, `seconds` after the grant of its slot."""
        self._slowest_start = max(self._slowest_start or 0.0, seconds)

    def came_up(self) -> None:
        """Record that an agent became a node of the run."""
        self._any_came_up = True

    @property
    def slow_after(self) -> float:
        """Seconds from the grant after which an agent counts as slow."""
        if self._slowest_start is None:
            return _SLOW_SECONDS
        return min(_SLOW_SECONDS, max(_LEAST_SLOW_SECONDS, _SLOW_FACTOR * self._slowest_start))

    def slow_at(self, slot: Slot) -> float:
        """Return when the agent in a slot counts as slow."""
        return slot.granted_at + self.slow_after

    def overdue_at(self, slot: Slot) -> float:
        """Return when the process of the agent in a slot should have started.

        It gets twice the time after each that did not start there, up to an hour: so an agent that is slow to start,
        but healthy, is not given up again and again.
        """
        patience = self._start_timeout * 2.0 ** min(self._unstarted[slot.place], 10)
        return slot.due_since + (patience if patience == inf else min(patience, _MOST_PATIENCE))

    def unstarted(self, place: str) -> None:
        """Record that an agent was given up whose process had not started."""
        self._unstarted[place] += 1

    def process_started(self, place: str) -> None:
        """Record that the process of an agent has started."""
        del self._unstarted[place]

    @property
    def cannot_start(self) -> bool:
        """Whether several agents died and none ever came up, so that it is no use to start more."""
        return not self._any_came_up and self._failed_starts >= _MOST_FAILED_STARTS

    def died(self, place: str, lived: float | None, *, silent: bool) -> float:
        """Record a death; return the seconds to wait there: 0 after the first death in a row, then 1, 2, 4 and so on.

        `lived`: seconds since the agent came up; None: it never did. `silent`: the agent was only not heard of, so its
        host may be cut off; then there is no reason to wait.
        """
        if lived is None:
            self._failed_starts += 1
        elif lived >= _STABLE_SECONDS:
            del self._deaths[place]
        if silent:
            return 0.0
        self._deaths[place] += 1
        deaths = self._deaths[place]
        return min(_LONGEST_PAUSE, 2.0 ** min(deaths - 2, 10)) if deaths > 1 else 0.0


_NOT_NEEDED = "it is not needed any more"
_UNUSABLE = "no node is wanted on its host"
_OCCUPIED = "its host has an agent already"

_CUT_OFF_SECONDS = 70.0
"""How long Ray may think that a host which was cut off is alive, and place agents there that nobody can reach."""


class Allocator:
    """Decides which slots of a run there are. Each call may leave requests in `slots`. Not thread-safe.

    `now`, everywhere: seconds of a monotonic clock.
    """

    def __init__(self, bundles: Sequence[Bundle], gang: int, *, spread: bool, start_timeout: float = inf) -> None:
        """`bundles`: one for each wanted node. The first `gang` of them are reserved together, all or nothing.

        `spread`: each node is to have a host of its own. `start_timeout`: see `Backoff`.
        """
        differing = tuple(dict.fromkeys(bundles))
        #: The kind of each wanted node: the index of its bundle among those that differ.
        self._kinds = [differing.index(bundle) for bundle in bundles]
        self._desired = Counter(self._kinds)
        self.slots = SlotTable(differing, self._kinds[:gang])
        #: Until the gang is granted nothing else is requested: a single slot might take a host that the gang needs.
        self._is_gang_granted = False
        self._min_nodes = gang
        self._hosts = _HostFilter(self.slots, spread)
        self._backoff = Backoff(start_timeout)

    # What was observed.

    def start(self, now: float) -> None:
        """Request the gang: the slots that are reserved together or not at all."""
        self.slots.reserve_gang()
        self._reconcile(now)

    def granted(self, hosts: Mapping[int, HostId], now: float) -> None:
        """Slots were granted. `hosts`: by slot."""
        nodes_on = Counter(slot.host for slot in self.slots if slot.node and slot.number not in hosts)
        for number, host in hosts.items():
            slot = self.slots.get(number)
            if slot is None:
                continue
            self._is_gang_granted = True
            if slot.is_up:
                continue
            slot.host = host
            if not slot.node:
                continue
            if self._hosts.is_unwanted(slot) or (self._hosts.spread and nodes_on[host]):
                self.slots.clear(slot, _OCCUPIED)
            else:
                nodes_on[host] += 1
                self.slots.announce(slot, now)
        self._reconcile(now)

    def moved(self, hosts: Mapping[int, HostId], now: float) -> None:
        """Ray may have moved slots of the gang away from hosts that died. `hosts`: where they are, by slot."""
        for number, host in hosts.items():
            slot = self.slots.get(number)
            if slot is not None and not slot.is_up and host and host != slot.host:
                slot.host, slot.retry_at = host, now
                slot.due_since = now if slot.node else inf
        self._reconcile(now)

    def reported(self, node: NodeId) -> None:
        """Record that the process of a node's agent has started: it has reported."""
        slot = self.slots.of(node)
        if slot is not None and slot.due_since < inf:
            slot.due_since = inf
            self._backoff.process_started(slot.place)

    def joined(self, node: NodeId, host: HostId, now: float) -> bool:
        """Record that the agent of a node came up on a host. Return False if the node is not wanted."""
        slot = self.slots.of(node)
        if slot is None:
            return False
        slot.host = host
        if slot.granted_at < inf:
            self._backoff.started(now - slot.granted_at)
        is_wanted = not self._hosts.is_unwanted(slot) and self._missing()[slot.kind] > 0
        if is_wanted:
            self.slots.mark_up(slot, now)
            self._backoff.came_up()
            self._hosts.cut_off.pop(host, None)
        else:
            self.slots.clear(slot, _OCCUPIED)
        self._reconcile(now)
        return is_wanted

    def lost(self, node: NodeId, now: float, *, silent: bool = False) -> float:
        """Record that a node is gone or given up. Return the seconds until an agent is started in its slot again.

        `silent`: nothing was heard of it, so its host may be cut off.
        """
        slot = self.slots.of(node)
        if slot is None:
            return 0.0
        lived = None if slot.up_since is None else now - slot.up_since
        pause = self._backoff.died(slot.place, lived, silent=silent)
        if silent and slot.host:
            self._hosts.cut_off[slot.host] = now + _CUT_OFF_SECONDS
        self.slots.stop_agent(slot)
        slot.retry_at = now + pause
        self._reconcile(now)
        return pause

    def draining(self, hosts: Iterable[HostId], now: float) -> None:
        """These hosts are being drained, and no others."""
        self._hosts.draining = frozenset(hosts)
        self._reconcile(now)

    def cordon(self, host: HostId, now: float) -> None:
        """Request no more nodes on this host. A node that is up there stays, and another one is requested too."""
        self._hosts.cordoned |= {host}
        self._reconcile(now)

    def uncordon(self, host: HostId, now: float) -> None:
        """Allow nodes on this host again."""
        self._hosts.cordoned -= {host}
        self._reconcile(now)

    def scale(self, nodes: int, now: float) -> None:
        """Set the number of nodes: drop the last kinds, or add nodes of the last kind. Nodes that are up stay."""
        self._kinds = [*self._kinds, *[self._kinds[-1]] * (nodes - len(self._kinds))][:nodes]
        self._desired = Counter(self._kinds)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        self._reconcile(now)

    # What the fleet asks.

    def next_tick(self, now: float) -> float | None:
        """Return when to call `tick` if nothing is observed before; None: never."""
        retries = [slot.retry_at for slot in self.slots if slot.failed and not slot.node]
        slow = [self._backoff.slow_at(slot) for slot in self.slots if slot.node and not slot.is_up and not slot.failed]
        times = (*retries, *slow, *map(self._backoff.overdue_at, self.slots), *self._hosts.cut_off.values())
        return min((at for at in times if now < at < inf), default=None)

    def cannot_start(self, *, has_raised: bool) -> bool:
        """Whether another agent would be lost too, as the last one was before it came up.

        `has_raised`: it could not be made. On one host of several, that need not repeat.
        """
        return len(self.slots.up_nodes()) < self._min_nodes if has_raised else self._backoff.cannot_start

    def is_on_usable_host(self, node: NodeId) -> bool:
        """Whether a node is up on a host that is neither drained nor cordoned."""
        return self.slots.is_up(node) and self.slots.host_of(node) not in self._hosts.unusable

    def shift(self, seconds: float) -> None:
        """Move all recorded times by `seconds`: this process has another clock."""
        self.slots.shift(seconds)
        self._hosts.cut_off = {host: until + seconds for host, until in self._hosts.cut_off.items()}

    # Desired, observed, and the difference.

    def _reconcile(self, now: float) -> None:
        self._forget_unusable(now)
        missing = self._missing()
        for kind in self._desired:
            self._reconcile_kind(kind, missing[kind], now)
        self._renew_outdated()
        self._release_gang()

    def _forget_unusable(self, now: float) -> None:
        """Give up agents that start where no node is wanted, or do not start; do not count on those that are slow."""
        self._hosts.cut_off = {host: until for host, until in self._hosts.cut_off.items() if until > now}
        for slot in self.slots:
            if slot.is_up:
                continue
            if (slot.node or not slot.in_gang) and self._hosts.is_unwanted(slot):
                self.slots.clear(slot, _OCCUPIED if self._hosts.is_occupied(slot) else _UNUSABLE)
            elif self._backoff.overdue_at(slot) <= now:
                self._give_up_unstarted(slot, now)
            slot.failed |= self._backoff.slow_at(slot) <= now

    def _give_up_unstarted(self, slot: Slot, now: float) -> None:
        """Give up an agent that Ray may have forgotten, as it does when its head dies just then. The slot stays."""
        why = f"Ray has not started its agent within {now - slot.due_since:.0f} s"
        self.slots.stop_agent(slot, why, never_started=True)
        self._backoff.unstarted(slot.place)
        slot.retry_at = now

    def _missing(self) -> Counter[int]:
        """Return how many nodes of each kind are wanted and not up on a usable host."""
        unusable = self._hosts.unusable
        if not unusable:
            return self._desired - self.slots.up_of
        return self._desired - Counter(slot.kind for slot in self.slots if slot.is_up and slot.host not in unusable)

    def _reconcile_kind(self, kind: int, missing: int, now: float) -> None:
        """Keep one slot pending for each missing node of this kind, besides failed slots."""
        pending = [slot for slot in self.slots if slot.kind == kind and not slot.is_up]
        for slot in pending:
            if missing == 0 and slot.failed:
                self.slots.clear(slot, _NOT_NEEDED)
            elif not slot.node and slot.retry_at <= now and not self._hosts.is_unwanted(slot):
                self.slots.start_agent(slot)
                slot.due_since = now if slot.host else inf
        hopeful = [slot for slot in pending if slot in self.slots and self._hosts.is_hopeful(slot)]
        if self._is_gang_granted:
            for _ in range(missing - len(hopeful)):
                self.slots.reserve(kind, self._hosts.to_avoid(kind))
        surplus = [slot for slot in hopeful if not slot.in_gang]
        surplus.sort(key=lambda slot: (slot.host != "", -slot.number))
        for slot in surplus[: max(0, len(hopeful) - missing)]:
            self.slots.clear(slot, _NOT_NEEDED)

    def _renew_outdated(self) -> None:
        """Request slots anew that avoid a host which need not be avoided any more, or do not avoid a cordoned one."""
        is_outdated: dict[tuple[int, frozenset[HostId]], bool] = {}  # many slots avoid the same hosts
        for slot in self.slots:
            if slot.in_gang or slot.host:
                continue
            key = slot.kind, slot.avoid
            if key not in is_outdated:
                avoid = self._hosts.to_avoid(slot.kind)
                is_outdated[key] = bool(slot.avoid - avoid or self._hosts.cordoned - slot.avoid)
            if is_outdated[key]:
                self.slots.clear(slot, _NOT_NEEDED)
                self.slots.reserve(slot.kind, self._hosts.to_avoid(slot.kind))

    def _release_gang(self) -> None:
        """Release the gang once no slot of it is needed: it would hold hosts, and Ray would replace them."""
        gang = self.slots.gang
        if self._is_gang_granted and not any(slot.node for slot in gang) and not self._missing():
            for slot in gang:
                self.slots.release(slot)


class FleetBase(ABC):
    """What all fleets do: they ask an allocator, with the time, and queue the requests that follow.

    How a request is done is up to the fleet.
    """

    def __init__(
        self,
        plan: Plan,
        spec: AgentSpec,
        say: Callable[[str], None],
        *,
        start_timeout: float = math.inf,
        allocator: Allocator | None = None,
    ) -> None:
        """`say` takes a line for a person. It is called in the thread that calls a method of the fleet.

        `start_timeout`: see `Allocator`. `allocator`: of another driver, with which this one goes on.
        """
        self._spec = spec
        self._say = say
        self._allocator = allocator or Allocator(
            plan.bundles, plan.min_nodes, spread=plan.spread, start_timeout=start_timeout
        )
        self._tell: Tell = lambda _: None
        #: Guards `_allocator`, and the order in which its requests are queued.
        self._lock = threading.Lock()

    @abstractmethod
    def _put(self, request: Request) -> None:
        """Queue a request of the allocator's. Requests are done in order, in a thread of the fleet's."""

    # Which nodes there are.

    def joined(self, node: NodeId, host: HostId) -> bool:
        """Accept an agent that is ready on this host. False: it is not needed there, and was ended."""
        return self._decide(partial(self._allocator.joined, node, host))

    def cordon(self, host: HostId) -> None:
        """Reserve nothing more on this host."""
        self._decide(partial(self._allocator.cordon, host))

    def uncordon(self, host: HostId) -> None:
        """Allow reservations on the host again."""
        self._decide(partial(self._allocator.uncordon, host))

    def scale(self, nodes: int) -> None:
        """Set the number of nodes from now on."""
        self._decide(partial(self._allocator.scale, nodes))

    def _decide(self, ask: Callable[[float], _Answer]) -> _Answer:
        """Call a method of the allocator with the time, and queue the requests that follow from it."""
        with self._lock:
            answer = ask(time.monotonic())
            for request in self._allocator.slots.take_requests():
                self._put(request)
        return answer

    def _idle_seconds(self) -> float:
        """Return for how many seconds the allocator need not be ticked; infinity: for ever."""
        with self._lock:
            now = time.monotonic()
            at = self._allocator.next_tick(now)
        return math.inf if at is None else at - now

    def _spec_for(self, request: StartAgent) -> AgentSpec:
        return replace(self._spec, node=request.node, nproc=request.bundle.nproc)
