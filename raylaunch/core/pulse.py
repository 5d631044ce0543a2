"""The signs of life of workers, as a node reports them each second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One worker, as the shared page of its node shows it."""

    rank: int
    marks: int
    """Optimizer steps and heartbeats of this attempt."""
    age: float
    """Seconds since the last sign of life; meaningless where there was none."""
    step: int | None = None
    """The last step that was done, by the script's own count; None where that is not known."""
    asked: int | None = None
    """The last step that the script asked `should_checkpoint` about; None: it never did."""
    saved: int | None = None
    """The last step that the script said is saved."""
    busy: bool = False
    """In a section where no sign of life is to be expected."""
    first_age: float | None = None
    """Seconds since the first mark of the attempt; None where only the last is known."""
    first_step: int | None = None
    """The first step that was done in the attempt; None where only the last is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """All workers of a node that are alive, at one moment."""

    attempt: int
    marks: tuple[Mark, ...]
