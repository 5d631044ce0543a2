"""Finding one step at which all workers of a world save, without a collective among them.

A step a little ahead is proposed to every node. Workers that come to it wait there, and every node says how far its
own were when they could first know of it. Where one had passed the step already, another is proposed that nobody can
have passed; else it is settled, and all save. It takes one message to each node and back, rarely two.
"""

from __future__ import annotations

from collections.abc import Iterable

from raylaunch.cluster.fleet import Fleet
from raylaunch.node.messages import Proposed

_BEYOND = 2
"""Steps: a worker that had passed the step is stopped by the first one it asks about, at the latest."""


class Proposal:
    """One checkpoint that was asked for."""

    def __init__(self, fleet: Fleet, attempt: int, nodes: Iterable[str], step: int) -> None:
        self._fleet = fleet
        self._attempt = attempt
        self._nodes = tuple(nodes)
        self._propose(step)

    def _propose(self, step: int) -> None:
        self.step = step
        self._missing = set(self._nodes)
        self._reached = -1
        for node in self._nodes:
            self._fleet.ask_checkpoint(node, self._attempt, step)

    def take(self, word: Proposed) -> None:
        """A node's answer."""
        if (word.attempt, word.step) != (self._attempt, self.step) or word.node not in self._missing:
            return
        self._missing.remove(word.node)
        self._reached = max(self._reached, word.reached)
        if self._missing:
            return
        if self._reached >= self.step:
            self._propose(self._reached + _BEYOND)
            return
        for node in self._nodes:
            self._fleet.settle(node, self._attempt, self.step)
