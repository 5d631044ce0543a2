"""A sync point: the step at which all workers of an attempt save, agreed on without a collective (JAX's term).

It takes two phases, as two-phase commit does. Prepare: a step a little ahead is proposed to every node, workers that
come to it wait there, and every node answers how far its workers were when they could first know of the proposal. If
one had passed the step, a later step is proposed, which no worker can have passed. Commit: otherwise all nodes are
told to save at that step. Prepare takes one message to each node and back, rarely two.
"""

from __future__ import annotations

from collections.abc import Iterable

from raylaunch.cluster.fleet_api import Fleet
from raylaunch.node.protocol.messages import CommitCheckpoint, ProposeCheckpoint, StepProposed

_STEPS_BEYOND = 2
"""From the furthest worker to the next proposal: a worker asks once a step, so it cannot have gone further by then."""


class SyncPoint:
    """The search for the step of one requested checkpoint. `step` is the one that was proposed last."""

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
            self._fleet.send(node, ProposeCheckpoint(attempt=self._attempt, step=step))

    def answered(self, answer: StepProposed) -> None:
        """Take a node's answer. Answers to earlier proposals are ignored."""
        if (answer.attempt, answer.step) != (self._attempt, self.step) or answer.node not in self._missing:
            return
        self._missing.remove(answer.node)
        self._reached = max(self._reached, answer.reached)
        if self._missing:
            return
        if self._reached >= self.step:
            self._propose(self._reached + _STEPS_BEYOND)
            return
        for node in self._nodes:
            self._fleet.send(node, CommitCheckpoint(attempt=self._attempt, step=self.step))
