"""What an agent has still to say: events and output, each in order, and output before the word of its end."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from raylaunch.node.logs import Output

_MOST_AT_ONCE = 4 * 1024 * 1024
"""Bytes of output in one message."""
_FULL = 8 * 1024 * 1024
"""Bytes of output: when the driver is so far behind, logs are not read on. They can wait, nothing is lost by it."""


Event = TypeVar("Event")


class Outbox(Generic[Event]):
    """An event that `last` marks waits for all output before it; what comes after such an event waits with it."""

    def __init__(self) -> None:
        self._events: deque[tuple[Event, bool]] = deque()
        self._output: deque[Output] = deque()
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether output comes faster than it is taken."""
        return self._bytes >= _FULL

    def put(self, event: Event, *, last: bool) -> None:
        """One more event."""
        self._events.append((event, last))

    def put_output(self, output: list[Output]) -> None:
        """Some more output."""
        self._output.extend(output)
        self._bytes += sum(len(part.data) for part in output)

    def take(self, *, more_output: bool) -> tuple[list[Event], list[Output]]:
        """What may be said next. `more_output`: some that belongs before the events is still to come."""
        output: list[Output] = []
        size = 0
        while self._output and size < _MOST_AT_ONCE:
            output.append(self._output.popleft())
            size += len(output[-1].data)
        self._bytes -= size
        events: list[Event] = []
        while self._events and not (self._events[0][1] and (self._output or more_output)):
            events.append(self._events.popleft()[0])
        return events, output

    def has_some(self, *, more_output: bool) -> bool:
        """Whether `take` would give anything."""
        return bool(self._output) or bool(self._events and not (self._events[0][1] and more_output))
