"""Node events: what a node tells the driver. Times in them are the node's own (`NodeTime`).

`Supervisor.poll` returns them, the agent's reports carry them, and only the driver turns them into events of the core,
whose times are `RunTime`. `WorkersForked`, `StoreOpened` and `ManifestChanged` come from the fork server as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.newtypes import NodeTime
from raylaunch.node.protocol.messages import ManifestChanged, Ready, StoreOpened, WorkersForked


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

    node: str
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

    node: str
    attempt: int
    stacks: tuple[Stack, ...]


NodeEvent = (
    StoreOpened
    | ManifestChanged
    | WorkersForked
    | ProcessesExited
    | ProcessesStopped
    | StepProposed
    | CheckpointAnswer
    | StacksDumped
)
"""What an agent passes on to the driver."""

SupervisorEvent = Ready | NodeEvent
"""What `Supervisor.poll` returns. The agent makes an `AgentReady` of `Ready`."""
