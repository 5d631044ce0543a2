"""The steps of an attempt, and the steps and the time lost between two attempts."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.machine.events_and_actions import Progressed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """The first and the last progress report of one attempt, which may be the same."""

    first: Progressed
    last: Progressed

    @property
    def first_step(self) -> int | None:
        """The number of the first step."""
        return self.first.low

    @property
    def ended(self) -> float:
        """When the last step was done, in seconds since the run began."""
        if self.last is not self.first or self.first.rate <= 0:
            return self.last.marked
        return self.first.marked + (self.first.marks - 1) / self.first.rate

    def lost_after(self, before: StepHistory) -> int | None:
        """Return the number of steps of an earlier attempt that this one did again; None for steps without numbers."""
        if self.first_step is None or before.last.high is None:
            return None
        return max(0, before.last.high - (self.first_step - 1))

    def pause_after(self, before: StepHistory) -> float:
        """Return the seconds between the last step of an earlier attempt and the first of this one."""
        return max(0.0, self.first.marked - before.ended)
