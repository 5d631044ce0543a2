"""The slots of a run, and the requests about them that a fleet carries out. Nothing is decided here.

Slots are numbers; nodes and hosts are names. `RayFleet` carries requests out with Ray, `LocalFleet` on this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from raylaunch.core.newtypes import NO_HOST, NO_NODE, HostId, NodeId
from raylaunch.core.placement.packing import Bundle


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
class UnwantedHosts:
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
