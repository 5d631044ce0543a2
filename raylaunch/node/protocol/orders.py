"""Orders: what the driver sends to a node. One dataclass each; `Order` is the union of all of them.

The driver's executor, sync point and hang probe create orders. `Fleet.send` carries them to the node's agent, which
hands them to `Supervisor.handle`. The orders that concern running workers only go on to the fork server as they are.
No order has a direct answer: the node events that each one leads to are named below.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.placement.ranks import Assignment, Rendezvous


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
    signal: str = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers:
    """Send the signal to the attempt's workers, which go on running. Does nothing where the attempt has ended."""

    attempt: int
    signal: str


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


Order = LaunchWorkers | StopWorkers | SignalWorkers | DumpStacks | OpenStore | ProposeCheckpoint | CommitCheckpoint
