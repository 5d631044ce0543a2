"""Facts, in the past tense. `at` is seconds since the run began, stamped by whoever runs the machine."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failure import Failure
from raylaunch.core.stacks import StackGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGranted:
    """The cluster gave a place; the agent there is starting, and the node will join or be lost."""

    at: float
    node: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent is up on a node and ready to start workers. A name is never used again after `NodeLost`."""

    at: float
    node: str
    address: str
    nproc: int
    host: str = ""
    """Ray's id of the machine, the same for all agents that ever run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node will not answer again. Nobody must wait for it."""

    at: float
    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining:
    """A node will go at `deadline`. It still runs, but no new attempt may count on it."""

    at: float
    node: str
    deadline: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """When a node came past what, from one attempt to the next. Its own clock: CLOCK_MONOTONIC, in seconds."""

    ordered: float
    """The fork server had the order."""
    ended: float
    """Nothing was left of the attempts before."""
    forked: float
    """All workers were forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    """All workers of the node are forked. `pids` are their process ids there, by local rank."""

    at: float
    attempt: int
    node: str
    pids: tuple[int, ...] = ()
    turnover: Turnover | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersExited:
    """Workers ended by themselves: some failed, or (no failures) all of the node's finished well."""

    at: float
    attempt: int
    node: str
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    """Nothing of the attempt is left on the node. `failures` are those not told before."""

    at: float
    attempt: int
    node: str
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCheckpointed:
    """The answer to `AskCheckpoint`: all workers of the node have saved this step, and wait for their end.

    `step` None: some of them do not ask `should_checkpoint`, so a signal is all that can be said to them.
    """

    at: float
    attempt: int
    node: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersHung:
    """Workers were silent for too long. `failures` are those that the others wait for, as far as can be told."""

    at: float
    attempt: int
    failures: tuple[Failure, ...]
    groups: tuple[StackGroup, ...] = ()
    """What every worker was doing, the odd ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """How far the attempt is: said when all its workers have done a step, when it is about to end, and now and then.

    Steps are the script's own numbers where it tells them, or its optimizer does; else None.
    """

    at: float
    attempt: int
    marks: int
    """Steps of this attempt, of the worker that is furthest."""
    low: int | None
    high: int | None
    """The last steps of the worker furthest behind, and of the one furthest ahead."""
    marked: float
    """When the last of them was done, seconds since the run began; of the first Progressed, when the first was."""
    saved: int | None = None
    """The last step that the script said is saved."""
    slowest: int = 0
    """The rank furthest behind."""
    rate: float = 0.0
    """Steps per second, over the last while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A person or their scheduler wants the run to end."""

    at: float
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardAsked:
    """A signal came that is the workers' own affair."""

    at: float
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time that `WakeAt` asked for has come."""

    at: float


NodeEvent = NodeGranted | NodeJoined | NodeLost | NodeDraining
WorkerEvent = WorkersStarted | WorkersExited | WorkersStopped | WorkersCheckpointed
Event = NodeEvent | WorkerEvent | WorkersHung | Progressed | StopAsked | ForwardAsked | Tick
