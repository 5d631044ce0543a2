"""The actions of the machine, in the imperative. Each has its reason in `why`, for the terminal and the journal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start an attempt on these nodes, given in rank order. Each node answers with `WorkersStarted`.

    A node that gets this order first kills what is left of earlier attempts. So a `Stop` without grace just before it
    need not be sent to nodes of this roster.
    """

    attempt: int
    roster: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Send the attempt's workers the signal, and SIGKILL after `grace` seconds. Each node answers `WorkersStopped`."""

    attempt: int
    nodes: tuple[str, ...]
    grace: float
    why: str
    signal: str = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """Make all workers of the attempt save at one step, a little ahead. Each node answers `WorkersCheckpointed`."""

    attempt: int
    nodes: tuple[str, ...]
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
    nodes: tuple[str, ...]
    signal: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Stop the agent of a node that is not needed or did not answer in time, and ignore its further reports."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Request no more nodes on this host until `Uncordon`, and cancel pending requests there (as `kubectl cordon`)."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncordon:
    """Allow nodes on this host again."""

    host: str
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


WorkerAction = Launch | Stop | RequestCheckpoint | ReportUnsaved | ForwardSignal
NodeAction = Release | Cordon | Uncordon
Action = WorkerAction | NodeAction | SetTimer | Finish
