"""What a node tells the driver: `NodeStatus`, the whole truth about it, of which the newest counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raylaunch.core.machine.observe import WorkersStatus
from raylaunch.core.newtypes import HostId, assert_never
from raylaunch.node.protocol.messages import (
    ManifestChanged,
    NodeWarning,
    Ready,
    StepProposed,
    StoreOpened,
)
from raylaunch.node.protocol.section import CapabilitySection

StatusEvent = WorkersStatus | StoreOpened | ManifestChanged | StepProposed | NodeWarning | CapabilitySection
"""What changes the status of a node that is up: all but the answer to a request."""

_MOST_WARNINGS = 50
"""The newest are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReady:
    """The fork server takes orders: the node can join."""

    host: HostId
    address: str
    nproc: int
    ready: Ready
    interface_env: dict[str, str] = field(default_factory=dict)
    """The variables that the node's workers get in a world of several hosts, so that other hosts can reach them."""
    threads: str = ""
    """OMP_NUM_THREADS of its workers in all attempts; `""`: it is not set, or depends on the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What became of the last order to open the store of an attempt."""

    opened: StoreOpened
    generation: int
    """The first of the node's statuses that said so: to open a store may fail twice in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """All that is true of a node. Each part stays until something newer takes its place."""

    generation: int = 0
    """Counts the node's statuses. One that comes late is older than what is known, and is ignored."""
    up: AgentReady | None = None
    """None: its fork server is not ready yet."""
    workers: WorkersStatus = field(default_factory=WorkersStatus)
    stores: tuple[StoreStatus, ...] = ()
    """One for each attempt whose store this node was told to open, except attempts before its workers' attempt."""
    proposed: StepProposed | None = None
    sections: dict[str, bytes] = field(default_factory=dict)
    """What each capability tells, by its name."""
    warnings: tuple[str, ...] = ()
    """What a person should know of the node, each once, the newest last."""

    def after(self, event: AgentReady | StatusEvent) -> NodeStatus:
        """Return the status after something has happened on the node."""
        changed = replace(self, generation=self.generation + 1)
        match event:
            case AgentReady():
                return replace(changed, up=event)
            case StoreOpened():
                others = tuple(store for store in self.stores if store.opened.attempt != event.attempt)
                return replace(changed, stores=(*others, StoreStatus(opened=event, generation=changed.generation)))
            case StepProposed():
                return replace(changed, proposed=event)
            case CapabilitySection():
                return replace(changed, sections=self.sections | {event.capability: event.body})
            case ManifestChanged(why=why) | NodeWarning(why=why):
                if not why or why in self.warnings:
                    return self
                return replace(changed, warnings=(*self.warnings, why)[-_MOST_WARNINGS:])
            case WorkersStatus():
                stores = tuple(store for store in self.stores if store.opened.attempt >= event.attempt)
                return replace(changed, workers=event, stores=stores)
            case _:
                return assert_never(event)


class StatusFeed:
    """The status of a node, and what of it its driver was told last."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: the one of the driver that started the node's agent."""
        self._status = NodeStatus()
        self._told = (epoch, self._status)

    def add(self, event: AgentReady | StatusEvent) -> None:
        """Something has happened on the node."""
        self._status = self._status.after(event)

    def is_asked_first(self, epoch: int) -> bool:
        """Return whether the driver of this epoch was told nothing yet."""
        return epoch != self._told[0]

    def news(self, epoch: int) -> NodeStatus | None:
        """Return what to tell the driver of this epoch; None: it was told that last."""
        last, self._told = self._told, (epoch, self._status)
        return None if last == self._told else self._status
