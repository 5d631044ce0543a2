"""Orders, in the imperative. Every decision carries its `why`, for the status line, the log and the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start the attempt on these nodes, in rank order.

    A node that gets this first ends, without grace, whatever it still has of earlier attempts. So a `Stop` without
    grace just before it need not be sent to nodes of this roster: both are one message.
    """

    attempt: int
    roster: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the attempt's workers on these nodes: the signal, SIGKILL after `grace` seconds. Answer: `WorkersStopped`."""

    attempt: int
    nodes: tuple[str, ...]
    grace: float
    why: str
    signal: str = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCheckpoint:
    """Have the attempt's workers save, all at one step a little ahead. Answer of each node: `WorkersCheckpointed`."""

    attempt: int
    nodes: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Send the attempt's workers on these nodes a signal; the run goes on. No answer."""

    attempt: int
    nodes: tuple[str, ...]
    signal: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give the node up: it did not answer in its time. End its agent; nothing more is heard of it."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shun:
    """Ask for no more nodes on this host, until `Readmit`; what was asked for there already is taken back."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Readmit:
    """The host may be used again."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send `Tick` at this time. Only the latest counts."""

    at: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over."""

    exit_code: int
    why: str


Action = Launch | Stop | AskCheckpoint | Forward | Release | Shun | Readmit | WakeAt | Finish
