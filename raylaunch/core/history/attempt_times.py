"""When each attempt did what: the times from which the time per state and the cost of restarts follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Launch,
    NodeJoined,
    NodeLost,
    Progressed,
    Release,
    RequestCheckpoint,
    RestartRequested,
    Stop,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId, StrEnum
from raylaunch.core.record.attempt import StepHistory
from raylaunch.core.record.journal import JournalEntry


class Interruption(StrEnum):
    """What ended an attempt, if not the end of the script."""

    FAILURE = "failure"
    """A worker failed."""
    HANG = "hang"
    NODE_LOST = "node lost"
    RESIZE = "resize"
    """It was ended on purpose: nodes joined, or would be taken away."""
    REQUEST = "request"
    """A person requested a restart."""
    STOP = "stop"
    """The run was stopped."""
    NONE = ""
    """It was not ended, or all of its workers finished."""


@dataclass(slots=True, kw_only=True)
class AttemptTimes:
    """One attempt. Times are in seconds since the run began; None: it did not happen, or not yet."""

    number: int
    roster: tuple[NodeId, ...]
    workers: int
    stayed: int = 0
    """How many of the workers are processes of the attempt before."""
    why: str
    """Why it was started."""
    launched_at: float
    running_at: float | None = None
    """When all workers were started."""
    first_step_at: float | None = None
    """When all workers had done their first step."""
    last_step_at: float | None = None
    """When the worker that was furthest ahead had done its last step."""
    steps: int = 0
    """The steps of that worker."""
    first_step: int | None = None
    last_step: int | None = None
    """The numbers of these steps; None also if they have none."""
    lost_steps: int | None = None
    """How many of the steps a later attempt did again. None: there is none with steps, or they have no numbers."""
    saving_at: float | None = None
    """When its workers were asked to save before they are ended."""
    ended_at: float | None = None
    """When it was decided to end it."""
    stopped_at: float | None = None
    """When its processes were gone, if the next attempt waited for that."""
    why_ended: str = ""
    interruption: Interruption = Interruption.NONE

    def __str__(self) -> str:
        return f"attempt {self.number}"


@dataclass(slots=True)
class _Present:
    """What is known of the present attempt besides its times."""

    unstarted: set[NodeId] = field(default_factory=set)
    unstopped: set[NodeId] = field(default_factory=set)
    is_hung: bool = False
    has_failed: bool = False
    has_lost_nodes: bool = False
    is_requested: bool = False

    def interruption(self, *, is_last: bool) -> Interruption:
        if self.is_hung:
            return Interruption.HANG
        if self.has_lost_nodes:
            return Interruption.NODE_LOST
        if self.has_failed:
            return Interruption.FAILURE
        if is_last:
            return Interruption.STOP
        return Interruption.REQUEST if self.is_requested else Interruption.RESIZE


class TimesBuilder:
    """Notes the times of all attempts from the entries of the journal, one after the other."""

    def __init__(self) -> None:
        self.attempts: list[AttemptTimes] = []
        self._present = _Present()
        #: Workers by node, of nodes that joined and were neither lost nor released.
        self._nproc: dict[NodeId, int] = {}
        self._steps: StepHistory | None = None
        #: The latest earlier attempt with steps, and these.
        self._before: tuple[AttemptTimes, StepHistory] | None = None
        self._now = 0.0

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        if entry.event is not None:
            self._now = max(self._now, entry.event.at)
            self._note_node(entry.event)
            if self.attempts and getattr(entry.event, "attempt", 0) == self.attempts[-1].number:
                self._note_workers(entry.event, self.attempts[-1])
        for action in entry.actions:
            self._note_action(action)

    def _note_node(self, event: Event) -> None:
        match event:
            case NodeJoined(node=node):
                self._nproc[node] = event.nproc
            case RestartRequested():
                self._present.is_requested = True
            case NodeLost(node=node):
                self._nproc.pop(node, None)
                if self.attempts and self.attempts[-1].ended_at is None and node in self.attempts[-1].roster:
                    self._present.has_lost_nodes = True
                self._is_stopped(node)
            case _:
                pass

    def _note_workers(self, event: Event, attempt: AttemptTimes) -> None:
        match event:
            case WorkersStarted(node=node):
                attempt.stayed += event.stayed
                self._present.unstarted.discard(node)
                if not self._present.unstarted and attempt.running_at is None and attempt.ended_at is None:
                    attempt.running_at = self._now
            case WorkersExited(failures=failures) if failures:
                self._present.has_failed |= attempt.ended_at is None
            case WorkersHung():
                self._present.is_hung = True
            case WorkersStopped(node=node):
                self._is_stopped(node)
            case Progressed():
                self._note_steps(event, attempt)
            case _:
                pass

    def _is_stopped(self, node: NodeId) -> None:
        if node in self._present.unstopped:
            self._present.unstopped.discard(node)
            if not self._present.unstopped:
                self.attempts[-1].stopped_at = self._now

    def _note_steps(self, event: Progressed, attempt: AttemptTimes) -> None:
        if self._steps is None:
            self._steps = StepHistory(first=event, last=event)
            attempt.first_step_at, attempt.first_step = event.marked, event.low
            if self._before is not None:
                earlier, steps = self._before
                earlier.lost_steps = self._steps.lost_after(steps)
        self._steps = StepHistory(first=self._steps.first, last=event)
        attempt.last_step_at = max(event.marked, self._steps.ended)
        attempt.steps, attempt.last_step = event.marks, event.high

    def _note_action(self, action: Action) -> None:
        match action:
            case Launch():
                self._begin(action)
            case RequestCheckpoint() if self.attempts:
                self.attempts[-1].saving_at = self._now
            case Stop() if self.attempts and self.attempts[-1].ended_at is None:
                self._present.unstopped = set(action.nodes)
                self._end(action.why)
            case Release(node=node):
                self._nproc.pop(node, None)
                self._is_stopped(node)
            case _:
                pass

    def _end(self, why: str) -> None:
        latest = self.attempts[-1]
        latest.ended_at, latest.why_ended = self._now, why
        latest.interruption = self._present.interruption(is_last=True)

    def _begin(self, launch: Launch) -> None:
        if self.attempts:
            if self.attempts[-1].ended_at is None:
                self._end(launch.why)
            self.attempts[-1].interruption = self._present.interruption(is_last=False)
            if self._steps is not None:
                self._before = self.attempts[-1], self._steps
        workers = sum(self._nproc.get(node, 0) for node in launch.roster)
        self.attempts.append(
            AttemptTimes(
                number=launch.attempt, roster=launch.roster, workers=workers, why=launch.why, launched_at=self._now
            )
        )
        self._steps, self._present = None, _Present(unstarted=set(launch.roster))


def mean_rate(attempts: Iterable[AttemptTimes]) -> float | None:
    """Return the steps per second while attempts made steps; None if there are no two steps."""
    steps, seconds = 0, 0.0
    for attempt in attempts:
        if attempt.first_step_at is not None and attempt.last_step_at is not None:
            steps += attempt.steps - 1
            seconds += attempt.last_step_at - attempt.first_step_at
    return steps / seconds if seconds > 0 else None
