"""The outbox of an agent: events and output that wait for the next report, each in order."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from raylaunch.node.logs.tail import LogOutput

MOST_AT_ONCE = 4 * 1024 * 1024
"""Bytes of output in one report."""
FULL = 8 * 1024 * 1024
"""Bytes of output that wait. More is not read from the logs until the driver has caught up; nothing is lost."""


Event = TypeVar("Event")


class Outbox(Generic[Event]):
    """An event that is put with `last` waits for all output before it, and later events wait behind it."""

    def __init__(self) -> None:
        self._events: deque[tuple[Event, bool]] = deque()
        self._output: deque[LogOutput] = deque()
        self.queued_bytes = 0

    @property
    def full(self) -> bool:
        """Whether no more output should be put."""
        return self.queued_bytes >= FULL

    def put(self, event: Event, *, last: bool) -> None:
        """Append an event. `last`: no output of its attempt comes after it."""
        self._events.append((event, last))

    def put_output(self, output: list[LogOutput]) -> None:
        """Append output of workers to the next report."""
        self._output.extend(output)
        self.queued_bytes += sum(len(part.data) for part in output)

    def take(self, *, more_output: bool) -> tuple[list[Event], list[LogOutput]]:
        """Remove and return what can be reported now. `more_output`: logs have output that comes before events."""
        output: list[LogOutput] = []
        size = 0
        while self._output and size < MOST_AT_ONCE:
            output.append(self._output.popleft())
            size += len(output[-1].data)
        self.queued_bytes -= size
        events: list[Event] = []
        while self._events and not (self._events[0][1] and (self._output or more_output)):
            events.append(self._events.popleft()[0])
        return events, output

    def has_some(self, *, more_output: bool) -> bool:
        """Return whether `take` would return anything."""
        return bool(self._output) or bool(self._events and not (self._events[0][1] and more_output))
