"""All messages of a node: between the driver and the node, and between its supervisor and its fork server.

The driver creates an `Order`. `Fleet.send` carries it to the node's agent, which hands it to `Supervisor.handle`; the
fork server gets a `ForkServerOrder`. No order has a direct answer: what each one leads to is named below. The fork
server sends a `ForkServerEvent`; the agent reports a `NodeEvent`, of which the driver makes an event of the core. Times
in messages are the node's own (`NodeTime`).
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.events_and_actions import RestartTimings
from raylaunch.core.newtypes import SIGTERM, NodeId, NodeTime, SignalName
from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.node.protocol.peer_messages import PeerOrder, PeerReport
from raylaunch.worker.runtime.spec import WorkerSpec

# From the driver to a node.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWorkers:
    """Kill what is left of earlier attempts, then start this node's workers of the next one.

    Leads to `WorkersForked`, and to `ProcessesExited` when workers end by themselves.
    """

    assignment: Assignment
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Send all processes of the attempt the signal, and SIGKILL after `grace` seconds. Leads to `ProcessesStopped`."""

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

    Leads to `StepProposed`, or to `CheckpointAnswer` with step None where the script never asks
    `should_checkpoint`.
    """

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Have the workers save at the step that was proposed last: phase two. Leads to `CheckpointAnswer`."""

    attempt: int
    step: int


WorkerOrder = (
    LaunchWorkers | StopWorkers | SignalWorkers | DumpStacks | OpenStore | ProposeCheckpoint | CommitCheckpoint
)
"""What an agent passes on to its supervisor."""
Order = WorkerOrder | PeerOrder


# From the supervisor to the fork server.


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialize:
    """The first message to a fork server: what to import, and where the node's shared page is."""

    preload: tuple[str, ...]
    start_method: StartMethod
    page: str
    preload_auto: bool = False
    """`preload: auto`: also import what the workers of an attempt import, for those of the next one."""
    manifest: ImportManifest | None = None
    """What the fork server before this one could import ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Kill what is left of earlier attempts, wait until it is gone, then start these. Leads to `WorkersForked`."""

    attempt: int
    workers: tuple[WorkerSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStore:
    """Open the store of an attempt. Leads to `StoreOpened`. Stores of attempts before the present one are closed."""

    attempt: int
    address: str
    """The node's own address."""
    master_addr: str = ""
    """The job's `master_addr`, `""` where it sets none."""
    several_nodes: bool = False
    """Workers of other nodes must reach the store too."""
    port: int = 0
    """0: any free port. A store that died with its fork server is opened again at its port."""
    fixed: bool = False
    """All attempts use the same port, so earlier stores must leave it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPage:
    """Read the lease on the node's page now: it was shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """The run is over: kill all its processes. Leads to `ResetDone`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """After `Reset`: another run begins. Leads to `Ready`, or to an exit if an imported file has changed since."""


ForkServerOrder = (
    Initialize | StartWorkers | StopWorkers | SignalWorkers | DumpStacks | ReadPage | StartStore | Reset | Activate
)


# From the fork server to the supervisor.


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
class StandbyReady:
    """There is a standby that takes the fork server's place when it dies. A socket to it comes with this message.

    The standby is sent `Initialize` then, and sends `Ready` when nothing of the dead fork server is left.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """The store of the attempt listens at this port; 0: it could not be opened."""

    attempt: int
    port: int
    address: str = ""
    """What workers are told as MASTER_ADDR; `""`: the node's address."""
    why: str = ""
    """Why it could not be opened, or not at the job's `master_addr`; for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestChanged:
    """What the fork server can import ahead has changed. `why`: why a module cannot be, for a person; `""`: all can."""

    manifest: ImportManifest | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersForked:
    """All workers of the attempt are forked. `pids` are by local rank."""

    attempt: int
    pids: tuple[int, ...]
    timings: RestartTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker ended. The file with its report comes with this message. `stopped`: it had been told to stop."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    stopped: bool
    at: NodeTime
    why: str = ""
    """Why there never was a process; `""` where there was one. `pid` is 0 then, and no file comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGone:
    """No process of the attempt is left."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDumpStarted:
    """A worker was signalled to dump its stacks. The file comes with this message."""

    attempt: int
    rank: int
    start: int
    """The file offset at which this dump begins."""
    has_handler: bool
    """False: it does not catch the signal, and was not sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetDone:
    """No process of the run is left. `pid` is the fork server's."""

    pid: int


ForkServerEvent = (
    Ready
    | StandbyReady
    | WorkersForked
    | WorkerExited
    | WorkersGone
    | StoreOpened
    | StackDumpStarted
    | ResetDone
    | ManifestChanged
)


# From a node to the driver.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailure:
    """A worker process that did not exit with code 0, and all that the node knows of it."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    at: NodeTime
    """When it ended."""
    exit_code: int
    """As in `subprocess`: -9 stands for death by SIGKILL."""
    stopped: bool
    """It ended after it was told to."""
    host: str
    """The host name of the node."""
    error: WorkerError | None
    """The exception that ended it, as it reported it or wrote it into its error file."""
    error_file: str
    """Path of its error file on the node, `""` where there is none."""
    spoilt: str
    """Why the error file cannot be read, `""` where it can."""
    evidence: str
    """What else is known, such as a kill by the kernel for lack of memory."""
    stdout: str
    stderr: str
    """Paths of its log files on the node; `""` where none are kept."""
    tail: str
    """The last lines of its stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesExited:
    """Workers ended by themselves: those in `failures` failed; with none in it, all of the node exited with 0."""

    attempt: int
    failures: tuple[ProcessFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesStopped:
    """No process of the attempt is left on the node. `failures` are those of workers that ended after the order."""

    attempt: int
    failures: tuple[ProcessFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProposed:
    """A step was proposed to the node's workers, phase one of a checkpoint of the whole world."""

    node: NodeId
    attempt: int
    step: int
    reached: int
    """The last step that any of them had asked about when it could first know of the proposal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAnswer:
    """All workers of the node have saved this step, and wait for their end. None: some never ask for checkpoints."""

    attempt: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDumped:
    """The stacks of every live worker of the node's part of the attempt."""

    node: NodeId
    attempt: int
    stacks: tuple[Stack, ...]


ProcessEvent = StoreOpened | ManifestChanged | WorkersForked | ProcessesExited | ProcessesStopped
WorkersEvent = ProcessEvent | StepProposed | CheckpointAnswer | StacksDumped
"""What an agent passes on from its supervisor to the driver."""

NodeEvent = WorkersEvent | PeerReport
"""What an agent reports to the driver."""

SupervisorEvent = Ready | WorkersEvent
"""What `Supervisor.poll` returns. The agent makes an `AgentReady` of `Ready`."""
