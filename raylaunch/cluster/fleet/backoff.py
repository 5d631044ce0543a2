"""Backoff for agents that die again and again, or are not started; and when an agent counts as slow to start."""

from __future__ import annotations

from collections import Counter
from math import inf

from raylaunch.cluster.fleet.slot_table import Slot

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
_MOST_PATIENCE = 3600.0


class Backoff:
    """Start and death times of all agents of a run. A place is a host, or a slot whose host is not known."""

    def __init__(self, start_timeout: float = inf) -> None:
        """`start_timeout`: seconds from the grant of a slot in which the process of its agent should have started."""
        self._start_timeout = start_timeout
        #: Agents in a row whose processes were not started, by place.
        self._unstarted: Counter[str] = Counter()
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

    def slow_at(self, slot: Slot) -> float:
        """Return when the agent in a slot counts as slow."""
        return slot.granted_at + self.slow_after

    def overdue_at(self, slot: Slot) -> float:
        """Return when the process of the agent in a slot should have started.

        It gets twice the time after each that did not start there, up to an hour: so an agent that is slow to start,
        but healthy, is not given up again and again.
        """
        patience = self._start_timeout * 2.0 ** min(self._unstarted[slot.place], 10)
        return slot.due_since + (patience if patience == inf else min(patience, _MOST_PATIENCE))

    def unstarted(self, place: str) -> None:
        """Record that an agent was given up whose process had not started."""
        self._unstarted[place] += 1

    def process_started(self, place: str) -> None:
        """Record that the process of an agent has started."""
        del self._unstarted[place]

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
