"""Which nodes the driver believes in. One that it does not believe in any more may not have workers that train on.

Three things end a belief: the agent's process is gone, as its lifeline tells; nothing was heard of it for as long as
its lease may last; or Ray says that it is gone. Ray's word alone is no proof: it also comes where only the raylet died,
or a connection. So where the lifeline still holds, the agent is told to end, and one of the other two is waited for.
"""

from __future__ import annotations

from typing import Protocol

from raylaunch.cluster.fleet import Gone
from raylaunch.cluster.silence import Silence


class Lines(Protocol):
    """Connections by which either side knows that the other is there."""

    def holds(self, node: str) -> bool:
        """Whether the agent's process is known to be there."""

    def let_go(self, node: str) -> None:
        """Have the agent end its node."""


class Presence:
    """All nodes of the run, past and present. A name that was given up is never believed again."""

    def __init__(self, node_timeout: float, lines: Lines | None) -> None:
        self._timeout = node_timeout
        self._silence = Silence(node_timeout)
        self._lines = lines
        #: Nodes that are up.
        self._up: set[str] = set()
        self._past: set[str] = set()
        #: Nodes that Ray has given up, but whose processes may still be there.
        self._doubted: dict[str, Gone] = {}

    def heard(self, node: str, at: float) -> None:
        """It said something, at this time.monotonic(). May be called from any thread."""
        self._silence.heard(node, at)

    def is_past(self, node: str) -> bool:
        """Whether nothing that comes of it counts any more."""
        return node in self._past

    def is_up(self, node: str) -> bool:
        """Whether it can have workers."""
        return node in self._up

    def came_up(self, node: str, at: float) -> None:
        """From here on it must be heard of."""
        self._up.add(node)
        self._silence.watch(node, at)

    def doubted(self, gone: Gone) -> bool:
        """Ray has given the node up; whether to wait for the proof."""
        if gone.node not in self._up or self._lines is None or not self._lines.holds(gone.node):
            return False
        self._doubted[gone.node] = gone
        self._lines.let_go(gone.node)
        return True

    def severed(self, node: str) -> Gone:
        """The agent's process is gone."""
        return self._doubted.get(node) or Gone(node=node, why="its agent died")

    def silent(self, now: float) -> list[Gone]:
        """Nodes that were silent for too long, at this time.monotonic()."""
        why = f"nothing was heard of it for {self._timeout:g} s"
        return [Gone(node=node, why=why, silent=True) for node in self._silence.silent(now)]

    @property
    def next_look(self) -> float:
        """When to ask for silent ones, as time.monotonic(); infinity: never."""
        return self._silence.next_look

    def give_up(self, node: str) -> None:
        """It counts as lost. Should it be there after all, it is to end."""
        self._past.add(node)
        self._up.discard(node)
        self._doubted.pop(node, None)
        self._silence.forget(node)
        if self._lines is not None:
            self._lines.let_go(node)
