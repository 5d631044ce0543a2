"""The line about training progress: what a restart cost, and once a minute the step and the rate."""

from __future__ import annotations

from raylaunch.core.history.step_rates import behind
from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.record.attempt import StepHistory
from raylaunch.core.text import count, duration

_INTERVAL_SECONDS = 59.0
"""Minimum time between two lines of the same attempt. `Progressed` events come more often."""


class ProgressLine:
    """Makes lines from `Progressed` events. Keeps the steps of this attempt and of the last one that made steps."""

    def __init__(self) -> None:
        #: Whether there is a line once a minute.
        self.is_periodic = True
        self._steps: StepHistory | None = None
        self._previous: StepHistory | None = None
        self._shown_at = 0.0

    def update(self, event: Progressed) -> str:
        """Return the line for an event, "" if nothing is to be shown."""
        steps = self._steps
        if steps is None or event.attempt != steps.first.attempt:
            self._previous, self._steps = steps, StepHistory(first=event, last=event)
            self._shown_at = event.at
            return "" if self._previous is None else _resumed(self._steps, self._previous)
        self._steps = StepHistory(first=steps.first, last=event)
        if not self.is_periodic or event.at - self._shown_at < _INTERVAL_SECONDS:
            return ""
        self._shown_at = event.at
        return _status(event)


def _resumed(steps: StepHistory, previous: StepHistory) -> str:
    after = f"after {duration(steps.pause_after(previous))}"
    lost = steps.lost_after(previous)
    if lost is None:
        return f"training resumed {after}"
    return f"training resumed at step {steps.first_step} {after}, {count(lost, 'step')} lost"


def _status(event: Progressed) -> str:
    if event.high is None:  # such as SGD, which keeps no count that a checkpoint could restore
        return f"{count(event.marks, 'step')} in this attempt, {rate_text(event.rate)}"
    slowest = f", slowest rank {event.slowest} at step {event.low}" if behind(event) else ""
    return f"step {event.high}, {rate_text(event.rate)}{slowest}"


def rate_text(rate: float) -> str:
    """Return a number of steps per second as a person reads it."""
    if rate <= 0:
        return "no progress"
    return f"{rate:.1f} steps/s" if rate >= 1 else f"{duration(1 / rate)} per step"
