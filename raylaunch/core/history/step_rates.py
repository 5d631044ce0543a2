"""How fast the steps of a run were, and which ranks were behind, from the reports of progress in the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.newtypes import NodeId

MIN_SECONDS = 0.5
"""No rate is taken over a shorter time: it would be noise."""
BEHIND = 1
"""Steps. Reports of nodes come at different times, so that a rank may seem to be one step behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """The mean rate of the rank that is furthest ahead, between two reports of one attempt."""

    attempt: int
    begin: float
    end: float
    """In seconds since the run began."""
    per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that was more than a step behind the one furthest ahead."""

    rank: int
    node: NodeId
    reports: int
    """The reports in which it was the one furthest behind."""
    most_behind: int
    """The steps by which it was behind, at most."""
    last_at: float
    """When it was last seen so, in seconds since the run began."""


def behind(event: Progressed) -> int:
    """Return by how many steps the slowest rank is behind; 0: by hardly any, or that is not known.

    Not for the first report of an attempt, whose `low` is the first step.
    """
    if event.low is None or event.high is None or event.high - event.low <= BEHIND:
        return 0
    return event.high - event.low


class RatesBuilder:
    """Computes the rates from the reports of progress, one after the other."""

    def __init__(self) -> None:
        self.rates: list[StepRate] = []
        #: The number of reports from which a rank's place could be told.
        self.reports = 0
        self._slow: dict[tuple[int, NodeId], SlowRank] = {}
        #: Time and steps of the report before, of the same attempt.
        self._before: tuple[int, float, int] = (0, 0.0, 0)

    def add(self, event: Progressed, nodes: Sequence[tuple[NodeId, int]]) -> None:
        """Take a report. `nodes`: the nodes of the attempt in rank order, with their numbers of workers."""
        attempt, then, steps = self._before
        if attempt != event.attempt:
            then, steps = event.marked, 1
            end = then + (event.marks - 1) / event.rate if event.rate > 0 else then
            self._before = event.attempt, then, 1
        else:
            end = event.marked
        if end - then >= MIN_SECONDS and event.marks > steps:
            rate = (event.marks - steps) / (end - then)
            self.rates.append(StepRate(attempt=event.attempt, begin=then, end=end, per_second=rate))
            self._before = event.attempt, end, event.marks
        if attempt == event.attempt and event.low is not None and event.high is not None:
            self._note_slow(event, behind(event), nodes)

    def _note_slow(self, event: Progressed, steps: int, nodes: Sequence[tuple[NodeId, int]]) -> None:
        self.reports += 1
        if not steps:
            return
        node = _node_of(event.slowest, nodes)
        key = event.slowest, node
        before = self._slow.get(key) or SlowRank(
            rank=event.slowest, node=node, reports=0, most_behind=0, last_at=event.at
        )
        self._slow[key] = replace(
            before, reports=before.reports + 1, most_behind=max(before.most_behind, steps), last_at=event.at
        )

    def slow_ranks(self) -> list[SlowRank]:
        """Return the slow ranks, the one that was behind most often first."""
        return sorted(self._slow.values(), key=lambda slow: (-slow.reports, -slow.most_behind, slow.rank))


def _node_of(rank: int, nodes: Sequence[tuple[NodeId, int]]) -> NodeId:
    """Return the node of a rank; "" if it is not known."""
    for node, workers in nodes:
        if rank < workers:
            return node
        rank -= workers
    return NodeId("")
