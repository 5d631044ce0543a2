"""The messages between a node's supervisor and its fork server.

The supervisor sends a `ForkServerOrder`, and the fork server a `ForkServerEvent`, over the socket pair of `wire`.
Orders of the driver that the supervisor passes on are in `node_goal`, and events that it passes on to the driver in
`node_status`.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.measured import RestartTimings
from raylaunch.core.machine.workers_status import WorkerExit
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.node.protocol.node_goal import DumpStacks, SignalWorkers, StopWorkers
from raylaunch.node.protocol.node_status import ManifestChanged, Ready, StoreOpened
from raylaunch.worker.runtime.spec import WorkerSpec

# From the supervisor to the fork server.


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialize:
    """The first message to a fork server: what to import, and where the node's shared page is."""

    preload: tuple[str, ...]
    start_method: StartMethod
    page: str
    preload_auto: bool = False
    """`preload: auto`: also import what DDP needs of this torch and, for the next attempt, what workers import."""
    script: str = ""
    """The script whose text says whether it may need the former; `""`: workers run something else."""
    manifest: ImportManifest | None = None
    """What the fork server before this one could import ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Kill what is left of earlier attempts, wait until it is gone, then start these. Leads to `WorkersForked`."""

    attempt: int
    workers: tuple[WorkerSpec, ...]
    survivors: tuple[int, ...] = ()
    """Process ids of the last attempt's workers that may stay. A worker stays if it has returned in time."""
    return_seconds: int = 0
    """How long they may take to return."""
    to_complete: int = 0
    """How many bytes the first of them may write after that. The workers are reported when it has: see
    `SurvivorReturned.completed`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorReturned:
    """A survivor has left everything of the attempt before, and waits until this one begins on its node."""

    attempt: int
    pid: int
    completed: bool = False
    """It says after that that it has completed its last light commit, or could not."""


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
    Initialize
    | StartWorkers
    | SurvivorReturned
    | StopWorkers
    | SignalWorkers
    | DumpStacks
    | ReadPage
    | StartStore
    | Reset
    | Activate
)


# From the fork server to the supervisor.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed:
    """The fork server is about to end, or cannot be started."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersForked:
    """All workers of the attempt are forked. `pids` are by local rank."""

    attempt: int
    pids: tuple[int, ...]
    timings: RestartTimings
    stayed: int = 0
    """How many of them were not forked, but are processes of the attempt before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGone:
    """No process of the attempt is left."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDumpStarted:
    """A worker was signalled to dump its stacks, if that is possible. The file comes with this message."""

    attempt: int
    rank: int
    start: int
    """The file offset at which this dump begins."""
    is_signalled: bool
    """False: it does not catch the signal, or it has no file to write to, and was not sent it."""
    is_closed: bool
    """Whether the script has closed the worker's descriptor of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetDone:
    """No process of the run is left."""


ForkServerEvent = (
    Ready
    | ServerFailed
    | WorkersForked
    | WorkerExit
    | WorkersGone
    | StoreOpened
    | StackDumpStarted
    | ResetDone
    | ManifestChanged
)
"""With a `WorkerExit` comes the file with the worker's report, if there was a process."""
