"""The messages between the driver and a node.

The driver creates an `Order`. `Fleet.send` carries it to the node's agent, which hands it to `Supervisor.handle`. No
order has a direct answer: what each one leads to is named below. The agent makes a `NodeStatus` of the events, which it
tells the driver. Times in messages are the node's own (`NodeTime`).

Some of these messages go between the node's supervisor and its fork server too; see `forkserver_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.observe import WorkersStatus
from raylaunch.core.newtypes import SIGTERM, NodeId, SignalName
from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.node.protocol.section import CapabilitySection

# From the driver to a node.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWorkers:
    """Kill what is left of earlier attempts, then start this node's workers of the next one.

    What becomes of them is in the `WorkersStatus`.
    """

    assignment: Assignment
    rendezvous: Rendezvous
    staying: bool = False
    """Workers of the attempt before that can stay are not killed. They take part in the next one as they are."""
    has_survivors: bool = False
    """The same on any node of the attempt."""

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self.assignment.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Send all processes of the attempt the signal, and SIGKILL after `grace` seconds. Leads to `stopped`."""

    attempt: int
    grace: float
    signal: SignalName = SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers:
    """Send the signal to the attempt's workers, which go on running. Does nothing where the attempt has ended."""

    attempt: int
    signal: SignalName


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Have every worker of the attempt write the stacks of its threads. Leads to `StacksDumped`."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Open the TCPStore of an attempt on this node. Leads to `StoreOpened`."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeCheckpoint:
    """Propose the step at which the attempt's workers save: phase one of two.

    Leads to `StepProposed`, or to `has_saved` in the status, without a step, where the script never asks
    `should_checkpoint`.
    """

    attempt: int
    step: int
    expected: bool = False
    """All workers of an earlier attempt have asked: one that has not yet is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Make the workers save at the step that was proposed last: phase two. Leads to `has_saved`."""

    attempt: int
    step: int


WorkerOrder = (
    LaunchWorkers | StopWorkers | SignalWorkers | DumpStacks | OpenStore | ProposeCheckpoint | CommitCheckpoint
)
"""What an agent passes on to its supervisor."""
Order = WorkerOrder | CapabilitySection


# What happens on a node.


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


ProcessEvent = WorkersStatus | StoreOpened | ManifestChanged | StepProposed | StacksDumped
"""What the supervisor tells the agent. Of its workers it tells what is true of them now, whenever that has changed."""

NodeEvent = ProcessEvent | NodeWarning | CapabilitySection
"""What an agent is told, or notices itself, and makes its status of."""

SupervisorEvent = Ready | ProcessEvent
"""What `Supervisor.poll` returns. The agent makes an `AgentReady` of `Ready`."""
