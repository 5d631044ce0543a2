"""Which nodes have been silent for too long. Ray itself takes a minute to notice that a network is cut."""

from __future__ import annotations

MOST_BEATS = 1.0
_BEATS_PER_TIMEOUT = 5


def beat(node_timeout: float) -> float:
    """Seconds after which an agent speaks though it has nothing to say."""
    return min(MOST_BEATS, node_timeout / _BEATS_PER_TIMEOUT)


class Silence:
    """When each node was last heard of. Times are the driver's time.monotonic()."""

    def __init__(self, node_timeout: float) -> None:
        self._timeout = node_timeout
        self._patience = beat(node_timeout)
        self._heard: dict[str, float] = {}
        #: Nodes that are up, so that they must be heard of.
        self._watched: set[str] = set()
        #: Nobody can be overdue before this time: what is heard only moves it on.
        self._next = float("inf")
        self._not_before = 0.0

    def heard(self, node: str, at: float) -> None:
        """May be called from any thread, so that a main thread that is busy takes nobody for silent."""
        self._heard[node] = at

    def watch(self, node: str, at: float) -> None:
        """The node is up."""
        self._heard.setdefault(node, at)
        self._watched.add(node)
        self._next = min(self._next, self._heard[node] + self._timeout)

    def forget(self, node: str) -> None:
        """Nothing more is expected of it."""
        self._watched.discard(node)
        self._heard.pop(node, None)

    @property
    def next_look(self) -> float:
        """When to ask again; infinity: no node is up."""
        return self._next

    def silent(self, now: float) -> list[str]:
        """Nodes that are overdue. None where it was this process that stood still: their words may wait to be read."""
        if now < self._next:
            return []
        dues = {node: self._heard[node] + self._timeout for node in self._watched}
        self._next = max(self._not_before, min(dues.values(), default=float("inf")))
        if now - self._next > self._patience:
            self._next = self._not_before = now + self._patience
        if now < self._next:
            return []
        self._next = now  # those that are found are forgotten; then it is known who is next
        return sorted(node for node, due in dues.items() if now >= due)
