"""Facts, in the past tense. `at` is seconds since the run began, stamped by whoever runs the machine."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failure import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent is up on a node and ready to start workers. A name is never used again after `NodeLost`."""

    at: float
    node: str
    address: str
    nproc: int


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
class WorkersStarted:
    """All workers of the node are forked. `pids` are their process ids there, by local rank."""

    at: float
    attempt: int
    node: str
    pids: tuple[int, ...] = ()


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


WorkerEvent = WorkersStarted | WorkersExited | WorkersStopped
Event = NodeJoined | NodeLost | NodeDraining | WorkerEvent | StopAsked | ForwardAsked | Tick
