"""How long an agent is waited for, and how long nobody starts where agents die one after the other."""

from __future__ import annotations

from collections import Counter

_STEADY_SECONDS = 60.0
"""An agent that lived as long was well; its death is the first in a row."""
_LONGEST_PAUSE = 60.0
_SLOW_SECONDS = 60.0
"""An agent that does not come up so long after its grant may be on a host that was cut off; Ray may not know yet."""
_LEAST_SLOW_SECONDS = 20.0
"""A machine that is new takes longer for its first process; to ask for another one in vain may start a machine."""
_TIMES_SLOWER = 4
"""Than the slowest of the others: who takes so much longer is slow before."""


class Patience:
    """All agents of a run. Places are hosts, or whatever is known of where an agent was."""

    def __init__(self) -> None:
        self._slowest: float | None = None
        #: Deaths in a row.
        self._falls: Counter[str] = Counter()

    def came_up(self, seconds: float) -> None:
        """One took so long, from its grant."""
        self._slowest = max(self._slowest or 0.0, seconds)

    @property
    def slow_after(self) -> float:
        """Seconds after its grant, one is not counted on any more."""
        if self._slowest is None:
            return _SLOW_SECONDS
        return min(_SLOW_SECONDS, max(_LEAST_SLOW_SECONDS, _TIMES_SLOWER * self._slowest))

    def died(self, where: str, lived: float, *, silent: bool) -> float:
        """One did, that many seconds after it came up. The pause: none after the first; then 1, 2, 4 seconds and so on.

        `silent`: that is only what is believed, since its host may be cut off.
        """
        if lived >= _STEADY_SECONDS:
            del self._falls[where]
        if silent:
            return 0.0
        self._falls[where] += 1
        falls = self._falls[where]
        return min(_LONGEST_PAUSE, 2.0 ** min(falls - 2, 10)) if falls > 1 else 0.0
