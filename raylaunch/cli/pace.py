"""How far the run is, in a line now and then: after a restart what it cost, else where it stands."""

from __future__ import annotations

from raylaunch.core.course import Course
from raylaunch.core.events import Progressed
from raylaunch.core.words import count

_SECONDS = 59.0
"""Between two lines of the same attempt; what is said more often is for the journal."""


class Pace:
    """Remembers what was said of the steps of the present attempt, and of the latest before it that made any."""

    def __init__(self) -> None:
        self._course: Course | None = None
        self._before: Course | None = None
        self._said_at = 0.0

    def told(self, event: Progressed) -> str:
        """The line for it; `""` where there is none."""
        course = self._course
        if course is None or event.attempt != course.first.attempt:
            self._before, self._course = course, Course(first=event, last=event)
            self._said_at = event.at
            return "" if self._before is None else back(self._course, self._before)
        self._course = Course(first=course.first, last=event)
        if event.high is None or event.at - self._said_at < _SECONDS:
            return ""
        self._said_at = event.at
        return _status(event)


def back(course: Course, before: Course) -> str:
    """What a restart cost."""
    parts = [f"{course.pause_after(before):.1f} s between worlds"]
    lost = course.lost_after(before)
    if lost is not None:
        parts.insert(0, f"{count(lost, 'step')} lost")
    return ", ".join([f"back at step {course.first_step}" if lost is not None else "back", *parts])


def _status(event: Progressed) -> str:
    behind = event.low is not None and event.high is not None and event.high - event.low > 1
    slowest = f", slowest rank {event.slowest} at step {event.low}" if behind else ""
    return f"step {event.high}, {_pace(event.rate)}{slowest}"


def _pace(rate: float) -> str:
    if rate <= 0:
        return "standing still"
    return f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s a step"
