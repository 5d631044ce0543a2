"""How long it takes to save, as it was measured, and when to begin before a time at which the workers must be gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylaunch.core.newtypes import RunTime

STOP_MARGIN = 10.0
"""Seconds that a node has, beyond the grace, to report that its workers are gone where the run is to end in time."""
MAX_SAVING_SECONDS = 600.0
"""The longest SAVING phase: all workers have to come to one step and save, and steps and checkpoints may be large."""

_SHARE = 0.5
"""The part of the time until a deadline that is kept for saving and stopping at most; before, the world trains on."""
_UNMEASURED_SHARE = 0.1
"""The same for a save of which nothing was measured."""
_RESERVE = 2.0
"""How much longer a save may take than the longest that was measured."""
_STEPS_AHEAD = 3
"""Steps until the one at which all save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineSet:
    """The run is to be over by `deadline`: all workers save in time."""

    at: RunTime
    deadline: RunTime
    why: str
    """The reason, such as `SIGTERM leaves 30 s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A time by which workers must be gone."""

    at: float
    since: float
    """When the run learnt of it."""
    why: str

    def latest(self, seconds: float) -> float:
        """Return when to begin what takes so long."""
        return self.at - min(seconds, max(0.0, self.at - self.since) * _SHARE)


class SaveTime:
    """How long it takes until all workers have saved."""

    def __init__(self) -> None:
        #: The longest SAVING phase; None: there was none to its end.
        self._longest: float | None = None
        #: The longest that a rank has taken, and a step of late.
        self._save: float | None = None
        self._step = 0.0

    def saved(self, seconds: float) -> None:
        """Note how long a SAVING phase took at whose end all workers had saved."""
        self._longest = max(self._longest or 0.0, seconds)

    def reported(self, save: float | None, rate: float) -> None:
        """Note how long the slowest rank took to save, if that is known, and how many steps a second has."""
        if save is not None:
            self._save = max(self._save or 0.0, save)
        self._step = 1 / rate if rate else self._step

    @property
    def measured(self) -> float | None:
        """Seconds until all have saved; None: nothing was measured yet."""
        save = None if self._save is None else self._save + _STEPS_AHEAD * self._step
        return max((one for one in (self._longest, save) if one is not None), default=None)

    def expected(self, deadline: Deadline, least: float) -> float:
        """Return the seconds to keep for a save before a deadline. `least`: if nothing was measured."""
        if self.measured is not None:
            return _RESERVE * self.measured
        return min(MAX_SAVING_SECONDS, max(least, (deadline.at - deadline.since) * _UNMEASURED_SHARE))


@dataclass(slots=True)
class Timing:
    """What limits the time of a run, and when it looks at the clock."""

    deadline: Deadline | None = None
    """By when the run must be over; None: there is no such time."""
    save: SaveTime = field(default_factory=SaveTime)
    timer_at: float | None = None
    """The time of the latest `SetTimer` that has not fired."""
