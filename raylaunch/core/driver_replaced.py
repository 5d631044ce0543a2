"""The event of a takeover: another driver goes on with the run."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.newtypes import RunTime


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReplaced:
    """Another driver has taken over, and the agents obey it. The seconds of its phases follow each other.

    A driver that was replaced itself before the agents obeyed it has none.
    """

    at: RunTime
    driver: int
    """The number of this driver; the first one has 1. It is the epoch that agents compare."""
    process_seconds: float
    """From the end of the previous driver's process until this one ran; 0: no agent noticed the end."""
    state_seconds: float
    """Until it had the newest state from the agents."""
    prepare_seconds: float
    """Until it was connected, had read the run folder, and served the commands on runs."""
    agents_seconds: float
    """Until the agents obeyed it, and had told what is true there."""
    attempt: int = 0
    """The highest attempt of which any node was told, which may be none that the ledger has."""

    @property
    def seconds(self) -> float:
        """How long nobody was in command."""
        return self.process_seconds + self.state_seconds + self.prepare_seconds + self.agents_seconds

    @property
    def phases(self) -> str:
        """The seconds of each phase, for a person."""
        return (
            f"{self.process_seconds:.2f} s until its process ran, {self.state_seconds:.2f} s for the state, "
            f"{self.prepare_seconds:.2f} s to prepare, {self.agents_seconds:.2f} s until all agents obeyed"
        )
