"""Messages between the driver and a node about what the node holds for the script, and copies of it on other hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free all that the node holds for the script, since no agent that follows is to have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingStatus:
    """What the driver must know of what a node holds for the script."""

    has_files: bool = False
    """Whether the script has files in RAYLAUNCH_FAST_DIR on the node."""
    stuck_attempt: int = 0
    """The last attempt whose survivors had no commit from which to go on, if rank 0 is on the node; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWarning:
    """A copy to another host, or from it, has failed, and is tried again; or commits are lost."""

    why: str
    """A sentence for a person."""


CopyReport = HoldingStatus | CopyWarning
"""What a node reports to the driver."""
