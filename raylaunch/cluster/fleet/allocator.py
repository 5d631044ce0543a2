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
from raylaunch.node.protocol.node_goal import Order
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
    """Which bundle; the caller's number for it."""
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


class SlotTable:
    """All slots, by number and by node, with counts of the nodes that are up."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._by_node: dict[NodeId, Slot] = {}
        self._slots_made = 0
        self._nodes_made = 0
        #: Shared by all slots that were requested with an equal set: a thousand sets of a thousand hosts are too big.
        self._latest_avoid: frozenset[HostId] = frozenset()
        self.up_on: Counter[HostId] = Counter()
        """Nodes that are up, by host."""
        self.up_of: Counter[int] = Counter()
        """Nodes that are up, by kind."""

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

    def with_nodes(self) -> Iterator[Slot]:
        """Iterate over the slots in which an agent runs or starts."""
        return iter(self._by_node.values())

    def add(self, kind: int, *, in_gang: bool = False, avoid: frozenset[HostId] = frozenset()) -> Slot:
        """Add an empty slot with a number of its own."""
        self._slots_made += 1
        if avoid == self._latest_avoid:
            avoid = self._latest_avoid
        self._latest_avoid = avoid
        slot = self._slots[self._slots_made] = Slot(number=self._slots_made, kind=kind, in_gang=in_gang, avoid=avoid)
        return slot

    def remove(self, slot: Slot) -> None:
        """Remove a slot in which there is no agent."""
        del self._slots[slot.number]

    def occupy(self, slot: Slot) -> None:
        """Give an empty slot a node with a name that no node had before."""
        self._nodes_made += 1
        slot.node = NodeId(f"node-{self._nodes_made}")
        self._by_node[slot.node] = slot

    def mark_up(self, slot: Slot, now: float) -> None:
        """Record that the agent in the slot came up on the slot's host."""
        slot.up_since, slot.due_since, slot.failed = now, inf, False
        self.up_on[slot.host] += 1
        self.up_of[slot.kind] += 1

    def vacate(self, slot: Slot) -> None:
        """Record that no agent is in the slot any more. The slot counts as failed until one comes up in it."""
        self._by_node.pop(slot.node, None)
        if slot.is_up:
            self.up_on[slot.host] -= 1
            self.up_of[slot.kind] -= 1
        slot.node, slot.granted_at, slot.due_since, slot.up_since, slot.failed = NO_NODE, inf, inf, None, True

    def unfinished(
        self, bundles: Sequence[Bundle], reserved: Collection[int], started: Collection[NodeId]
    ) -> Iterator[Request]:
        """Yield the requests that were made and not carried out. `bundles`: by kind; the others: see `Allocator`."""
        yield from [ReleaseSlot(number) for number in reserved if number not in self._slots]
        gang = {slot.number: bundles[slot.kind] for slot in self if slot.in_gang}
        if not gang.keys() <= {*reserved}:
            yield ReserveGang(gang)
        for slot in self:
            if not slot.in_gang and slot.number not in reserved:
                yield ReserveSlot(slot.number, bundles[slot.kind], slot.avoid)
            if slot.node and not slot.is_up and slot.node not in started:
                yield StartAgent(slot.number, slot.node, bundles[slot.kind])

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`."""
        for slot in self._slots.values():
            slot.granted_at += seconds
            slot.due_since += seconds
            slot.retry_at += seconds
            slot.up_since = None if slot.up_since is None else slot.up_since + seconds


@dataclass(slots=True)
class _UnwantedHosts:
    """Hosts on which nothing new is wanted."""

    draining: frozenset[HostId] = frozenset()
    cordoned: frozenset[HostId] = frozenset()
    cut_off: dict[HostId, float] = field(default_factory=dict)
    """Hosts of silent nodes, with the time until which Ray may not know of it."""

    @property
    def unusable(self) -> frozenset[HostId]:
        """Hosts whose nodes are to be replaced."""
        return self.draining | self.cordoned


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
    """The slots of one run. Each call may leave requests, which `take_requests` returns. Not thread-safe.

    `now`, everywhere: seconds of a monotonic clock.
    """

    def __init__(self, bundles: Sequence[Bundle], gang: int, *, spread: bool, start_timeout: float = inf) -> None:
        """`bundles`: one for each wanted node. The first `gang` of them are reserved together, all or nothing.

        `spread`: each node is to have a host of its own. `start_timeout`: see `Backoff`.
        """
        #: The bundles that differ. A kind of node is its index here.
        self._bundles = tuple(dict.fromkeys(bundles))
        #: The kind of each wanted node.
        self._kinds = [self._bundles.index(bundle) for bundle in bundles]
        self._desired = Counter(self._kinds)
        self._spread = spread
        self._slots = SlotTable()
        for kind in self._kinds[:gang]:
            self._slots.add(kind, in_gang=True)
        #: Until the gang is granted nothing else is requested: a single slot might take a host that the gang needs.
        self._is_gang_granted = False
        self._hosts = _UnwantedHosts()
        self._backoff = Backoff(start_timeout)
        self._requests: list[Request] = []

    # What was observed.

    def start(self, now: float) -> None:
        """Request the gang: the slots that are reserved together or not at all."""
        self._requests.append(ReserveGang({slot.number: self._bundles[slot.kind] for slot in self._slots}))
        self._reconcile(now)

    def granted(self, hosts: Mapping[int, HostId], now: float) -> None:
        """Slots were granted. `hosts`: by slot."""
        nodes_on = Counter(slot.host for slot in self._slots.with_nodes() if slot.number not in hosts)
        for number, host in hosts.items():
            slot = self._slots.get(number)
            if slot is None:
                continue
            self._is_gang_granted = True
            if slot.is_up:
                continue
            slot.host = host
            if not slot.node:
                continue
            if self._is_unwanted(slot) or (self._spread and nodes_on[host]):
                self._clear(slot, _OCCUPIED)
            else:
                nodes_on[host] += 1
                slot.granted_at = slot.due_since = now
                self._requests.append(AnnounceNode(slot.node, host))
        self._reconcile(now)

    def moved(self, hosts: Mapping[int, HostId], now: float) -> None:
        """Ray may have moved slots of the gang away from hosts that died. `hosts`: where they are, by slot."""
        for number, host in hosts.items():
            slot = self._slots.get(number)
            if slot is not None and not slot.is_up and host and host != slot.host:
                slot.host, slot.retry_at = host, now
                slot.due_since = now if slot.node else inf
        self._reconcile(now)

    def reported(self, node: NodeId) -> None:
        """Record that the process of a node's agent has started: it has reported."""
        slot = self._slots.of(node)
        if slot is not None and slot.due_since < inf:
            slot.due_since = inf
            self._backoff.process_started(slot.place)

    def joined(self, node: NodeId, host: HostId, now: float) -> bool:
        """Record that the agent of a node came up on a host. Return False if the node is not wanted."""
        slot = self._slots.of(node)
        if slot is None:
            return False
        slot.host = host
        if slot.granted_at < inf:
            self._backoff.started(now - slot.granted_at)
        is_wanted = not self._is_unwanted(slot) and self._missing()[slot.kind] > 0
        if is_wanted:
            self._slots.mark_up(slot, now)
            self._backoff.came_up()
            self._hosts.cut_off.pop(host, None)
        else:
            self._clear(slot, _OCCUPIED)
        self._reconcile(now)
        return is_wanted

    def lost(self, node: NodeId, now: float, *, silent: bool = False) -> float:
        """Record that a node is gone or given up. Return the seconds until an agent is started in its slot again.

        `silent`: nothing was heard of it, so its host may be cut off.
        """
        slot = self._slots.of(node)
        if slot is None:
            return 0.0
        lived = None if slot.up_since is None else now - slot.up_since
        pause = self._backoff.died(slot.place, lived, silent=silent)
        if silent and slot.host:
            self._hosts.cut_off[slot.host] = now + _CUT_OFF_SECONDS
        self._slots.vacate(slot)
        slot.retry_at = now + pause
        self._requests.append(StopAgent(node, ""))
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

    def take_requests(self) -> list[Request]:
        """Return the requests that were not returned before, in the order in which they must be carried out."""
        requests, self._requests = self._requests, []
        return requests

    def next_tick(self, now: float) -> float | None:
        """Return when to call `tick` if nothing is observed before; None: never."""
        retries = [slot.retry_at for slot in self._slots if slot.failed and not slot.node]
        slow = [self._backoff.slow_at(slot) for slot in self._slots if slot.node and not slot.is_up and not slot.failed]
        times = (*retries, *slow, *map(self._backoff.overdue_at, self._slots), *self._hosts.cut_off.values())
        return min((at for at in times if now < at < inf), default=None)

    @property
    def up_count(self) -> int:
        """How many nodes are up, on whichever hosts."""
        return self._slots.up_of.total()

    @property
    def cannot_start(self) -> bool:
        """Whether several agents died and none ever came up."""
        return self._backoff.cannot_start

    def is_up(self, node: NodeId) -> bool:
        """Whether a node is up."""
        slot = self._slots.of(node)
        return slot is not None and slot.is_up

    def is_on_usable_host(self, node: NodeId) -> bool:
        """Whether a node is up on a host that is neither drained nor cordoned."""
        return self.is_up(node) and self.host_of(node) not in self._hosts.unusable

    def host_of(self, node: NodeId) -> HostId:
        """Return the host of a node; `NO_HOST`: not known."""
        slot = self._slots.of(node)
        return NO_HOST if slot is None else slot.host

    # After a driver that had this allocator.

    def up_nodes(self) -> list[NodeId]:
        """Return the nodes whose agents have come up and are not lost."""
        return [slot.node for slot in self._slots if slot.is_up]

    def unfinished(self, reserved: Collection[int], started: Collection[NodeId]) -> list[Request]:
        """Return the requests that were made and not carried out. `reserved`: slots; `started`: nodes with agents."""
        return [*self._slots.unfinished(self._bundles, reserved, started)]

    def start_of(self, node: NodeId) -> StartAgent | None:
        """Return the request by which the agent of a node is started; None: there is no such node."""
        slot = self._slots.of(node)
        return StartAgent(slot.number, node, self._bundles[slot.kind]) if slot is not None else None

    def shift(self, seconds: float) -> None:
        """Move all recorded times by `seconds`: this process has another clock."""
        self._slots.shift(seconds)
        self._hosts.cut_off = {host: until + seconds for host, until in self._hosts.cut_off.items()}

    def may_gang_have_moved(self) -> bool:
        """Whether slots of the gang may be on other hosts than they were, so that `moved` should be called."""
        return any(slot.in_gang and slot.failed for slot in self._slots)

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
        for slot in self._slots:
            if slot.is_up:
                continue
            if (slot.node or not slot.in_gang) and self._is_unwanted(slot):
                self._clear(slot, _OCCUPIED if self._is_occupied(slot) else _UNUSABLE)
            elif self._backoff.overdue_at(slot) <= now:
                self._give_up_unstarted(slot, now)
            slot.failed |= self._backoff.slow_at(slot) <= now

    def _missing(self) -> Counter[int]:
        """Return how many nodes of each kind are wanted and not up on a usable host."""
        unusable = self._hosts.unusable
        if not unusable:
            return self._desired - self._slots.up_of
        return self._desired - Counter(slot.kind for slot in self._slots if slot.is_up and slot.host not in unusable)

    def _reconcile_kind(self, kind: int, missing: int, now: float) -> None:
        """Keep one slot pending for each missing node of this kind, besides failed slots."""
        pending = [slot for slot in self._slots if slot.kind == kind and not slot.is_up]
        for slot in pending:
            if missing == 0 and slot.failed:
                self._clear(slot, _NOT_NEEDED)
            elif not slot.node and slot.retry_at <= now and not self._is_unwanted(slot):
                self._start_agent(slot)
                slot.due_since = now if slot.host else inf
        hopeful = [slot for slot in pending if slot in self._slots and self._is_hopeful(slot)]
        if self._is_gang_granted:
            for _ in range(missing - len(hopeful)):
                self._request_slot(kind)
        surplus = [slot for slot in hopeful if not slot.in_gang]
        surplus.sort(key=lambda slot: (slot.host != "", -slot.number))
        for slot in surplus[: max(0, len(hopeful) - missing)]:
            self._clear(slot, _NOT_NEEDED)

    def _renew_outdated(self) -> None:
        """Request slots anew that avoid a host which need not be avoided any more, or do not avoid a cordoned one."""
        is_outdated: dict[tuple[int, frozenset[HostId]], bool] = {}  # many slots avoid the same hosts
        for slot in self._slots:
            if slot.in_gang or slot.host:
                continue
            key = slot.kind, slot.avoid
            if key not in is_outdated:
                avoid = self._hosts_to_avoid(slot.kind)
                is_outdated[key] = bool(slot.avoid - avoid or self._hosts.cordoned - slot.avoid)
            if is_outdated[key]:
                self._clear(slot, _NOT_NEEDED)
                self._request_slot(slot.kind)

    def _release_gang(self) -> None:
        """Release the gang once no slot of it is needed: it would hold hosts, and Ray would replace them."""
        gang = [slot for slot in self._slots if slot.in_gang]
        if self._is_gang_granted and not any(slot.node for slot in gang) and not self._missing():
            for slot in gang:
                self._release(slot)

    def _is_hopeful(self, slot: Slot) -> bool:
        """Whether to count on the slot. Where an agent was lost, its host may be gone."""
        return not self._is_unwanted(slot) and not (slot.failed and self._spread and slot.host)

    def _is_unwanted(self, slot: Slot) -> bool:
        """Whether no node is wanted on the slot's host."""
        return slot.host in self._hosts.unusable or self._is_occupied(slot)

    def _is_occupied(self, slot: Slot) -> bool:
        return self._spread and self._slots.up_on[slot.host] > slot.is_up

    def _hosts_to_avoid(self, kind: int) -> frozenset[HostId]:
        """Return the hosts that a slot requested now is to be kept off."""
        avoid = self._hosts.cordoned.union(self._bundles[kind].avoid)
        if self._spread:
            avoid = avoid.union(self._hosts.cut_off, (slot.host for slot in self._slots if slot.host))
        return avoid

    # Changes of slots, each with its requests.

    def _request_slot(self, kind: int) -> None:
        slot = self._slots.add(kind, avoid=self._hosts_to_avoid(kind))
        self._requests.append(ReserveSlot(slot.number, self._bundles[kind], slot.avoid))
        self._start_agent(slot)

    def _start_agent(self, slot: Slot) -> None:
        self._slots.occupy(slot)
        self._requests.append(StartAgent(slot.number, slot.node, self._bundles[slot.kind]))

    def _give_up_unstarted(self, slot: Slot, now: float) -> None:
        """Give up an agent that Ray may have forgotten, as it does when its head dies just then. The slot stays."""
        why = f"Ray has not started its agent within {now - slot.due_since:.0f} s"
        self._requests.append(StopAgent(slot.node, why, never_started=True))
        self._backoff.unstarted(slot.place)
        self._slots.vacate(slot)
        slot.retry_at = now

    def _clear(self, slot: Slot, why: str) -> None:
        """Stop the slot's agent; release the slot unless it is one of the gang, which Ray cannot shrink."""
        if slot.node:
            self._requests.append(StopAgent(slot.node, why if slot.granted_at < inf else ""))
        self._slots.vacate(slot)
        if not slot.in_gang:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._requests.append(ReleaseSlot(slot.number))


class FleetBase(ABC):
    """What all fleets do: they ask an allocator, with the time, and queue the requests that follow.

    How a request is done, and how a node is sent an order, is up to the fleet: `_put` and `send` are its own.
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

    @abstractmethod
    def send(self, node: NodeId, order: Order) -> None:
        """Send an order to a node's agent, without waiting. Does nothing where the node has no agent any more."""

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
            for request in self._allocator.take_requests():
                self._put(request)
        return answer

    def _wake(self, now: float) -> float | None:
        """Return when the allocator is to be ticked, as time.monotonic(); None: never."""
        with self._lock:
            return self._allocator.next_tick(now)

    def _spec_for(self, request: StartAgent) -> AgentSpec:
        return replace(self._spec, node=request.node, nproc=request.bundle.nproc)
