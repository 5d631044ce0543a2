"""What a driver writes down of its decisions, for a driver that goes on with the run."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.cluster.driver.copy_ring import KnownCopies
from raylaunch.core.machine.run_state import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLedger:
    """Plain data: whatever a process has besides, the next one makes anew of this and of what nodes tell."""

    run: Run
    """Attempt, roster, spent restarts, excluded hosts, requested bounds: all that the machine decides by."""
    copies: KnownCopies
    warned: frozenset[str]
    """What a person was told of nodes."""
    calls_should_checkpoint: bool
    """As in `ProgressMonitor`."""
