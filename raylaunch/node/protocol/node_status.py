"""What a node tells the driver: `NodeStatus`, the whole truth about it, of which the newest counts.

The agent makes it of the events below, which come from the supervisor, and some of them from the fork server. Times are
the node's own (`NodeTime`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.core.newtypes import HostId, NodeId, assert_never
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.node.protocol.node_goal import CapabilitySection

_MOST_WARNINGS = 50
"""The newest are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The fork server has imported everything and takes orders.

    `why`: why it does not fork workers, and which imports failed, for a person. `torch`: whether torch is installed,
    without which no store can be opened.
    """

    start_method: StartMethod
    why: tuple[str, ...]
    torch: bool
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """The store of the attempt listens at this port; 0: it could not be opened."""

    attempt: int
    port: int
    address: str = ""
    """What workers are told as MASTER_ADDR; `""`: the node's address."""
    why: str = ""
    """Why it could not be opened, or not at the job's `master_addr`; that it died before; for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestChanged:
    """What the fork server can import ahead has changed. `why`: why a module cannot be, for a person; `""`: all can."""

    manifest: ImportManifest | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWarning:
    """A person should know something of the node."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProposed:
    """A step was proposed to the node's workers, phase one of a checkpoint of the whole world."""

    node: NodeId
    attempt: int
    step: int
    reached: int
    """The last step that any of them had asked about when it could first know of the proposal, or when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDumped:
    """The stacks of every live worker of the node's part of the attempt."""

    node: NodeId
    attempt: int
    stacks: tuple[Stack, ...]


_StatusEvent = WorkersStatus | StoreOpened | ManifestChanged | StepProposed | NodeWarning | CapabilitySection
"""What changes the status of a node that is up: all but the answer to a request."""

NodeEvent = _StatusEvent | StacksDumped
"""What an agent is told, or notices itself."""

SupervisorEvent = Ready | WorkersStatus | StoreOpened | ManifestChanged | StepProposed | StacksDumped
"""What `Supervisor.poll` returns. Of its workers it tells what is true of them now, whenever that has changed.

The agent makes an `AgentReady` of `Ready`.
"""


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

    def after(self, event: AgentReady | _StatusEvent) -> NodeStatus:
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

    def add(self, event: AgentReady | _StatusEvent) -> None:
        """Something has happened on the node."""
        self._status = self._status.after(event)

    def is_asked_first(self, epoch: int) -> bool:
        """Return whether the driver of this epoch was told nothing yet."""
        return epoch != self._told[0]

    def news(self, epoch: int) -> NodeStatus | None:
        """Return what to tell the driver of this epoch; None: it was told that last."""
        last, self._told = self._told, (epoch, self._status)
        return None if last == self._told else self._status
