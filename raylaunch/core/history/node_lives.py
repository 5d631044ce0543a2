"""The life of each node in a run: when it joined, in which attempts it was, and why it left."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylaunch.core.failures.failure import Failure
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Release,
    WorkersExited,
    WorkersHung,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId
from raylaunch.core.record.journal import JournalEntry


@dataclass(slots=True, kw_only=True)
class NodeLife:
    """One node. Times are in seconds since the run began; None: it did not happen, or not yet."""

    name: NodeId
    address: str
    workers: int = 0
    granted_at: float | None = None
    joined_at: float | None = None
    draining_at: float | None = None
    left_at: float | None = None
    why_left: str = ""
    is_lost: bool = False
    """Whether it was lost after it was ready, and not given up or sent away."""
    failures: int = 0
    """Workers that failed or hung there by themselves."""
    attempts: list[tuple[int, int]] = field(default_factory=list)
    """The attempts that it was part of, as ranges: the first and the last number of each unbroken series."""

    @property
    def begin(self) -> float:
        """When it is heard of first."""
        return self.granted_at if self.granted_at is not None else self.joined_at or 0.0

    @property
    def is_eventful(self) -> bool:
        """Whether there is anything to tell but that it took part until the end."""
        return self.is_lost or self.failures > 0 or self.draining_at is not None or self.left_at is not None


class LivesBuilder:
    """Computes the lives of nodes from the entries of the journal, one after the other."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeLife] = {}
        #: Nodes of the present attempt in rank order, with their workers.
        self.roster: tuple[tuple[NodeId, int], ...] = ()
        self._now = 0.0

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        if entry.event is not None:
            self._now = max(self._now, entry.event.at)
            self._note_event(entry.event)
        for action in entry.actions:
            self._note_action(action)

    def _note_event(self, event: Event) -> None:
        match event:
            case NodeGranted(node=node):
                self.nodes[node] = NodeLife(name=node, address=event.address, granted_at=event.at)
            case NodeJoined(node=node):
                life = self.nodes.setdefault(node, NodeLife(name=node, address=event.address))
                life.address, life.workers, life.joined_at = event.address, event.nproc, event.at
            case NodeLost(node=node) if node in self.nodes:
                life = self.nodes[node]
                life.is_lost |= life.left_at is None and life.joined_at is not None
                self._leave(node, event.why)
            case NodeDraining(node=node) if node in self.nodes:
                life = self.nodes[node]
                if life.left_at is None and life.draining_at is None:
                    life.draining_at = event.at
            case WorkersExited() | WorkersHung() | WorkersStopped():
                self._note_failures(event.failures)
            case _:
                pass

    def _note_failures(self, failures: tuple[Failure, ...]) -> None:
        for failure in failures:
            if failure.node in self.nodes and not failure.stopped and not failure.is_collateral:
                self.nodes[failure.node].failures += 1

    def _note_action(self, action: Action) -> None:
        match action:
            case Launch(attempt=attempt, roster=roster):
                self.roster = tuple((node, self.nodes[node].workers) for node in roster if node in self.nodes)
                for node, _ in self.roster:
                    spans = self.nodes[node].attempts
                    if spans and spans[-1][1] == attempt - 1:
                        spans[-1] = spans[-1][0], attempt
                    else:
                        spans.append((attempt, attempt))
            case Release(node=node) if node in self.nodes:
                self._leave(node, action.why)
            case _:
                pass

    def _leave(self, node: NodeId, why: str) -> None:
        life = self.nodes[node]
        if life.left_at is None:
            life.left_at, life.why_left = self._now, why
