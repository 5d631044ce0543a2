"""Heartbeats: what a node reports of its workers each second."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.machine.measured import CommitRate, NodeMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """The progress of one worker in the present attempt, as the shared page of its node shows it."""

    rank: int
    marks: int
    """The number of optimizer steps and `heartbeat()` calls in this attempt."""
    age: float
    """Seconds since the last sign of life; meaningless without one."""
    step: int | None = None
    """The number of the last step by the script's own count; None if unknown."""
    asked: int | None = None
    """The last step for which the script called `should_checkpoint`; None if it never did."""
    saved: int | None = None
    """The last step that the script reported as saved."""
    busy: bool = False
    """Whether it is in a `section`, in which no signs of life are expected."""
    stopped: bool = False
    """Whether its process is stopped by a signal. Looked up only if there was no sign of life for a while."""
    first_age: float | None = None
    """Seconds since the first mark of the attempt; None if only the last is known."""
    first_step: int | None = None
    """The number of the first step of the attempt; None if only the last is known."""
    committed: int | None = None
    """How many steps were completed in its last commit of `State`; None: there was none in the attempt."""
    save_seconds: float | None = None
    """How long its last checkpoint or commit of `State` took; None: that is not known."""
    commit_rate: CommitRate | None = None
    """None unless this is rank 0, and it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """All workers of a node that are alive at one time."""

    attempt: int
    marks: tuple[WorkerProgress, ...]
    memory: NodeMemory | None = None
    """None: the node holds nothing for the script."""
    copied: int | None = None
    """How many steps were completed in the last commit that is copied to another host; None: none is."""
