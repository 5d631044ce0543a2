"""The machine's input and output: events, in the past tense, and actions, each with its reason.

`at` is stamped by the driver when it learns of an event. Every action has a `why`, for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failures.failure import Failure
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.machine.measured import CommitRate, NodeMemory, RestartTimings
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.newtypes import NO_HOST, SIGTERM, HostId, NodeId, RunTime, SignalName


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGranted:
    """The cluster gave resources for a node. Its agent is starting; the node will join or be lost."""

    at: RunTime
    node: NodeId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """The agent of a node is ready to start workers. The name of a lost node is not used again."""

    at: RunTime
    node: NodeId
    address: str
    nproc: int
    host: HostId = NO_HOST
    """The id of the host (of the Ray node), the same for all agents that run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone and will not answer again."""

    at: RunTime
    node: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining:
    """A node will be taken away at `deadline`. It still runs, but must not be part of another attempt."""

    at: RunTime
    node: NodeId
    deadline: RunTime
    why: str
    by: str = ""
    """The person who requested it, such as `ada@login-1`: the node's host is not used again. "": the cluster takes it
    away.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachablePeer:
    """One node cannot connect to another one, though the driver reaches both."""

    node: NodeId
    peer: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersUnreachable:
    """Nodes of an attempt cannot connect to each other. It was tried since the attempt failed, or made no step."""

    at: RunTime
    attempt: int
    peers: tuple[UnreachablePeer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    """All workers of a node were started. `pids` are their process ids by local rank."""

    at: RunTime
    attempt: int
    node: NodeId
    pids: tuple[int, ...] = ()
    timings: RestartTimings | None = None
    stayed: int = 0
    """How many of its workers are survivors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersElastic:
    """A worker of the node can stay when the next attempt begins. All ranks have a commit from which it can go on."""

    at: RunTime
    attempt: int
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersExited:
    """Workers ended by themselves: some failed or, without `failures`, all of the node ended with exit code 0."""

    at: RunTime
    attempt: int
    node: NodeId
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    """All processes of the attempt on a node are gone. `failures` has the failures that were not reported before."""

    at: RunTime
    attempt: int
    node: NodeId
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCheckpointed:
    """All workers of a node have saved after `RequestCheckpoint`, at the same step, and wait for the signal."""

    at: RunTime
    attempt: int
    node: NodeId
    step: int | None
    """None: some of them do not call `should_checkpoint`, and only a signal can reach them; or all have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersHung:
    """Workers hang. `failures` has the workers that the others wait for, as far as their stacks tell."""

    at: RunTime
    attempt: int
    failures: tuple[Failure, ...]
    groups: tuple[StackGroup, ...] = ()
    """What all workers were doing, the suspects first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """How far an attempt is: reported after the first step of all workers, before the attempt ends, and at times.

    Steps are the numbers of the script, or else of its optimizer; None if there are none.
    """

    at: RunTime
    attempt: int
    marks: int
    """The marks (steps and heartbeats) of the worker that is furthest ahead, in this attempt."""
    low: int | None
    high: int | None
    """The last steps of the worker that is furthest behind, and of the one furthest ahead; see `ProgressReporter`."""
    marked: RunTime
    """When the last step was done; in the first report of an attempt, when all workers had done the first."""
    saved: int | None = None
    """The last step that all workers reported as saved."""
    slowest: int = 0
    """The rank that is furthest behind."""
    rate: float = 0.0
    """Marks per second during the last seconds."""
    committed: int | None = None
    """How many steps were completed in the newest commit of `State` that all workers have made; None: there is none."""
    copied: int | None = None
    """The same of the newest commit that all nodes have copied to other hosts."""
    slowest_save: float | None = None
    """How long the slowest worker took for its last checkpoint, or commit of `State`; None: that is not known."""
    commit_rate: CommitRate | None = None
    """How often `State` commits; None: that is not known, or the script says it."""
    memory: tuple[NodeMemory, ...] = ()
    """The memory of each node where it has changed since the attempt's last report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run is to end: the driver got a signal (`signals_to_handle`), or a person requested it."""

    at: RunTime
    signal: SignalName
    by: str = ""
    """The person who requested it, such as `ada@login-1`; "": nobody did, the signal was sent to the driver."""
    save_seconds: float = 0.0
    """How long the workers may save before they get the signal; 0: they get it at once."""
    now: bool = False
    """Kill the workers at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """A person, or a node whose survivors have nothing to restore, requested another attempt. It spends no restart."""

    at: RunTime
    by: str
    save_seconds: float
    """How long the workers may save first; 0: they are killed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """A person requested other bounds of the number of nodes, from now on."""

    at: RunTime
    by: str
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequested:
    """The driver got a signal that is passed on to the workers (`signals_to_forward`)."""

    at: RunTime
    signal: SignalName


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time of the latest `SetTimer` has come."""

    at: RunTime


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReplaced:
    """Another driver has taken over, and the agents obey it. The seconds of its phases follow each other.

    A driver that was replaced itself before the agents obeyed it has none.
    """

    at: RunTime
    driver: int
    """The number of this driver; the first one has 1. It is the epoch that agents compare."""
    process_seconds: float
    """From the end of the previous driver's process until this one ran; 0: no agent noticed the end."""
    state_seconds: float
    """Until it had the newest state from the agents."""
    prepare_seconds: float
    """Until it was connected, had read the run folder, and served the commands on runs."""
    agents_seconds: float
    """Until the agents obeyed it, and had told what is true there."""
    attempt: int = 0
    """The highest attempt of which any node was told, which may be none that the ledger has."""

    @property
    def seconds(self) -> float:
        """How long nobody was in command."""
        return self.process_seconds + self.state_seconds + self.prepare_seconds + self.agents_seconds

    @property
    def phases(self) -> str:
        """The seconds of each phase, for a person."""
        return (
            f"{self.process_seconds:.2f} s until its process ran, {self.state_seconds:.2f} s for the state, "
            f"{self.prepare_seconds:.2f} s to prepare, {self.agents_seconds:.2f} s until all agents obeyed"
        )


_NodeEvent = NodeGranted | NodeJoined | NodeLost | NodeDraining | PeersUnreachable
WorkerEvent = WorkersStarted | WorkersElastic | WorkersExited | WorkersStopped | WorkersCheckpointed
RequestEvent = StopRequested | ForwardRequested | RestartRequested | ResizeRequested
Event = _NodeEvent | WorkerEvent | WorkersHung | Progressed | RequestEvent | Tick | DeadlineSet | DriverReplaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start an attempt on these nodes, given in rank order. Each node answers with `WorkersStarted`.

    A node that gets this order first kills what is left of earlier attempts. So a `Stop` without grace just before it
    need not be sent to nodes of this roster.
    """

    attempt: int
    roster: tuple[NodeId, ...]
    why: str
    staying: tuple[NodeId, ...] = ()
    """Nodes on which workers of the attempt before take part if they can, instead of being killed: survivors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Send the attempt's workers the signal, and SIGKILL after `grace` seconds. Each node answers `WorkersStopped`."""

    attempt: int
    nodes: tuple[NodeId, ...]
    grace: float
    why: str
    signal: SignalName = SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """Make all workers of the attempt save at one step, a little ahead. Each node answers `WorkersCheckpointed`."""

    attempt: int
    nodes: tuple[NodeId, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportUnsaved:
    """Tell the user which workers of the attempt have not saved after `RequestCheckpoint`. There is no answer."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSignal:
    """Send the attempt's workers on these nodes a signal. The run goes on. There is no answer."""

    attempt: int
    nodes: tuple[NodeId, ...]
    signal: SignalName
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Stop a node's agent, and ignore its further reports. `frees_memory`: no other node needs what it holds."""

    node: NodeId
    why: str
    frees_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Request no more nodes on this host until `Uncordon`, and cancel pending requests there (as `kubectl cordon`)."""

    host: HostId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncordon:
    """Allow nodes on this host again."""

    host: HostId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Keep this number of nodes in the cluster from now on, spare ones included. Running nodes stay until `Release`."""

    nodes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Send a `Tick` at this time. It replaces the timer that was set before."""

    at: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run with this exit code."""

    exit_code: int
    why: str


_WorkerAction = Launch | Stop | RequestCheckpoint | ReportUnsaved | ForwardSignal
NodeAction = Release | Cordon | Uncordon | Scale
Action = _WorkerAction | NodeAction | SetTimer | Finish
