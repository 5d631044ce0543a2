"""Backoff for agents that die again and again, and the time after which an agent counts as slow to start."""

from __future__ import annotations

from collections import Counter

_STABLE_SECONDS = 60.0
"""After an agent lived this long, its death counts as the first in a row."""
_LONGEST_PAUSE = 60.0
_SLOW_SECONDS = 60.0
"""An agent that takes this long from its grant may be on a host that was cut off, which Ray may not know yet."""
_LEAST_SLOW_SECONDS = 20.0
"""New machines are slow to start their first process. A replacement in vain may make an autoscaler add a machine."""
_SLOW_FACTOR = 4
"""An agent that takes this many times as long as the slowest one so far counts as slow sooner."""
_MOST_FAILED_STARTS = 3


class Backoff:
    """Start and death times of all agents of a run. A place is a host, or a slot whose host is not known."""

    def __init__(self) -> None:
        self._slowest_start: float | None = None
        #: Deaths in a row, by place.
        self._deaths: Counter[str] = Counter()
        self._failed_starts = 0
        self._any_came_up = False

    def started(self, seconds: float) -> None:
        """Record that an agent started, `seconds` after the grant of its slot."""
        self._slowest_start = max(self._slowest_start or 0.0, seconds)

    def came_up(self) -> None:
        """Record that an agent became a node of the run."""
        self._any_came_up = True

    @property
    def slow_after(self) -> float:
        """Seconds from the grant after which an agent counts as slow."""
        if self._slowest_start is None:
            return _SLOW_SECONDS
        return min(_SLOW_SECONDS, max(_LEAST_SLOW_SECONDS, _SLOW_FACTOR * self._slowest_start))

    @property
    def cannot_start(self) -> bool:
        """Whether several agents died and none ever came up, so that it is no use to start more."""
        return not self._any_came_up and self._failed_starts >= _MOST_FAILED_STARTS

    def died(self, place: str, lived: float | None, *, silent: bool) -> float:
        """Record a death; return the seconds to wait there: 0 after the first death in a row, then 1, 2, 4 and so on.

        `lived`: seconds since the agent came up; None: it never did. `silent`: the agent was only not heard of, so its
        host may be cut off; then there is no reason to wait.
        """
        if lived is None:
            self._failed_starts += 1
        elif lived >= _STABLE_SECONDS:
            del self._deaths[place]
        if silent:
            return 0.0
        self._deaths[place] += 1
        deaths = self._deaths[place]
        return min(_LONGEST_PAUSE, 2.0 ** min(deaths - 2, 10)) if deaths > 1 else 0.0
