"""The steps of an attempt, and what it cost to come from one attempt to the next."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.events import Progressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The steps of one attempt, as far as they were told: the first and the last word of it, which may be one."""

    first: Progressed
    last: Progressed

    @property
    def first_step(self) -> int | None:
        """The number of the first step that was done."""
        return self.first.low

    @property
    def ended(self) -> float:
        """When the last step was done."""
        if self.last is not self.first or self.first.rate <= 0:
            return self.last.marked
        return self.first.marked + (self.first.marks - 1) / self.first.rate

    def lost_after(self, before: Course) -> int | None:
        """Steps of the attempt before that this one did again; None where they have no numbers."""
        if self.first_step is None or before.last.high is None:
            return None
        return max(0, before.last.high - (self.first_step - 1))

    def pause_after(self, before: Course) -> float:
        """Seconds between the last step of the attempt before and the first of this one."""
        return max(0.0, self.first.marked - before.ended)
