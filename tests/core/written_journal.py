"""Journals that tests write: events with the actions that followed; and attempts as they follow from them."""

from __future__ import annotations

from typing import Any

from machine_helpers import joined

from raylaunch.core.history.attempt_times import AttemptTimes
from raylaunch.core.machine.events_and_actions import Action, Event, Launch, Progressed, Stop
from raylaunch.core.record.journal import JournalEntry


def entry(event: Event | None, *actions: Action) -> JournalEntry:
    return JournalEntry(event=event, actions=actions)


def launch(attempt: int, *roster: str, why: str = "there are enough nodes") -> Launch:
    return Launch(attempt=attempt, roster=roster, why=why)


def stop(attempt: int, *nodes: str, why: str = "rank 1 on a was killed by SIGKILL") -> Stop:
    return Stop(attempt=attempt, nodes=nodes, grace=0.0, why=why)


def steps(
    at: float, marks: int, *, attempt: int = 1, high: int | None = None, low: int | None = None, **facts
) -> Progressed:
    """The last step was done at that time; its number is that of the marks, counted from 0."""
    high = marks - 1 if high is None else high
    return Progressed(
        at=at, attempt=attempt, marks=marks, low=high if low is None else low, high=high, marked=at, **facts
    )


def beginning(*nodes: str, at: float = 2.0) -> list[JournalEntry]:
    """Nodes join, and the first attempt is launched on all of them when the last has joined."""
    *earlier, last = nodes
    return [*(entry(joined(node, at)) for node in earlier), entry(joined(last, at), launch(1, *nodes))]


def attempt(number: int, launched_at: float, **facts: Any) -> AttemptTimes:
    return AttemptTimes(number=number, roster=("a",), workers=2, why="", launched_at=launched_at, **facts)
