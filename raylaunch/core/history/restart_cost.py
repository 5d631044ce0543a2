"""What each restart cost, by its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from raylaunch.core.history.attempt_times import AttemptTimes, Interruption
from raylaunch.core.history.time_per_state import lost_seconds
from raylaunch.core.newtypes import StrEnum


class RestartPart(StrEnum):
    """A part of the time between the last step of an attempt and the first one of the next."""

    DETECT = "detect"
    """From the last step until it was decided to end the attempt; 0 if it was ended on purpose."""
    SAVE = "save"
    """Until the workers had saved."""
    STOP = "stop"
    """Until the processes of the attempt were gone; 0 if that was left to the start of the next."""
    WAIT = "wait"
    """For nodes, or before a script that crashes in a loop is started again."""
    LAUNCH = "launch"
    """Until all workers were started."""
    FIRST_STEP = "first step"
    """Until all of them had done a step or, if they did none, until the attempt ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCost:
    """A restart, for whatever reason. Times are in seconds."""

    attempt: int
    """The number of the attempt that began."""
    at: float
    """When the attempt before was ended, since the run began."""
    interruption: Interruption
    why: str
    parts: dict[RestartPart, float]
    lost_steps: int | None
    """Steps of the attempt before that were done again; None if that is not known."""
    lost: float
    """The time that these steps had taken, and for which workers hung; `detect` is a part of it."""

    @property
    def seconds(self) -> float:
        """From the last step of the attempt before to the first one of this attempt."""
        return sum(self.parts.values())


def restart_costs(attempts: Sequence[AttemptTimes], until: float) -> list[RestartCost]:
    """Return the cost of all restarts. `until`: how far the journal goes, in seconds since the run began."""
    return [_cost(before, after, until) for before, after in pairwise(attempts)]


def _cost(before: AttemptTimes, after: AttemptTimes, until: float) -> RestartCost:
    ended = after.launched_at if before.ended_at is None else before.ended_at
    saving = ended if before.saving_at is None else before.saving_at
    on_purpose = before.interruption in (Interruption.RESIZE, Interruption.REQUEST, Interruption.STOP)
    last_step = saving if on_purpose or before.last_step_at is None else before.last_step_at
    over = until if after.ended_at is None else after.ended_at
    times = (
        *(last_step, saving, ended, before.stopped_at or ended, after.launched_at),
        *(after.running_at or over, after.first_step_at or over if before.steps or after.steps else 0.0),
    )
    parts, now = {}, times[0]
    for part, end in zip(RestartPart, times[1:], strict=True):
        parts[part] = max(0.0, end - now)
        now = max(now, end)
    return RestartCost(
        attempt=after.number,
        at=ended,
        interruption=before.interruption,
        why=after.why,
        parts=parts,
        lost_steps=before.lost_steps,
        lost=lost_seconds(before),
    )
