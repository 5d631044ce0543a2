"""The history of a run: its states, attempts, restarts, nodes and steps over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raylaunch.core.failures.failure import Failure
from raylaunch.core.history.attempt_times import AttemptTimes, Interruption
from raylaunch.core.history.step_rates import RatesBuilder, SlowRank, StepRate
from raylaunch.core.history.time_per_state import (
    StatesBuilder,
    StateSpan,
    TimeState,
    goodput,
    lost_seconds,
    seconds_per_state,
)
from raylaunch.core.machine.events_and_actions import (
    Action,
    DriverReplaced,
    Event,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    Release,
    WorkersExited,
    WorkersHung,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId, StrEnum
from raylaunch.core.record.journal import JournalEntry

MOST_HANGS = 20
"""The most hangs that are kept, with their stacks: the last ones."""
MOST_TAKEOVERS = 50
"""The most takeovers that are kept: the last ones."""


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


class RestartPart(StrEnum):
    """A part of the time between the last step of an attempt and the first one of the next."""

    DETECT = "detect"
    """From the last step until it was decided to end the attempt; 0 if it was ended on purpose."""
    SAVE = "save"
    """Until the workers had saved."""
    STOP = "stop"
    """Until the processes of the attempt were gone; 0 if that was left to the start of the next."""
    WAIT = "wait"
    """For nodes, or before a script that crashes in a loop is started again."""
    LAUNCH = "launch"
    """Until all workers were started."""
    FIRST_STEP = "first step"
    """Until all of them had done a step or, if they did none, until the attempt ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCost:
    """A restart, for whatever reason. Times are in seconds."""

    attempt: int
    """The number of the attempt that began."""
    at: float
    """When the attempt before was ended, since the run began."""
    interruption: Interruption
    why: str
    parts: dict[RestartPart, float]
    lost_steps: int | None
    """Steps of the attempt before that were done again; None if that is not known."""
    lost: float
    """The time that these steps had taken, and for which workers hung; `detect` is a part of it."""

    @property
    def seconds(self) -> float:
        """From the last step of the attempt before to the first one of this attempt."""
        return sum(self.parts.values())


def restart_costs(attempts: Sequence[AttemptTimes], until: float) -> list[RestartCost]:
    """Return the cost of all restarts. `until`: how far the journal goes, in seconds since the run began."""
    return [_cost(before, after, until) for before, after in pairwise(attempts)]


def _cost(before: AttemptTimes, after: AttemptTimes, until: float) -> RestartCost:
    ended = after.launched_at if before.ended_at is None else before.ended_at
    saving = ended if before.saving_at is None else before.saving_at
    on_purpose = before.interruption in (Interruption.RESIZE, Interruption.REQUEST, Interruption.STOP)
    last_step = saving if on_purpose or before.last_step_at is None else before.last_step_at
    over = until if after.ended_at is None else after.ended_at
    times = (
        *(last_step, saving, ended, before.stopped_at or ended, after.launched_at),
        *(after.running_at or over, after.first_step_at or over if before.steps or after.steps else 0.0),
    )
    parts, now = {}, times[0]
    for part, end in zip(RestartPart, times[1:], strict=True):
        parts[part] = max(0.0, end - now)
        now = max(now, end)
    return RestartCost(
        attempt=after.number,
        at=ended,
        interruption=before.interruption,
        why=after.why,
        parts=parts,
        lost_steps=before.lost_steps,
        lost=lost_seconds(before),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What happened in a run. Times are in seconds since it began."""

    seconds: float
    """How far the journal goes."""
    spans: tuple[StateSpan, ...]
    per_state: dict[TimeState, float]
    goodput: float | None
    """The part of the time in which it trained; None if no time has passed."""
    attempts: tuple[AttemptTimes, ...]
    restarts: tuple[RestartCost, ...]
    nodes: tuple[NodeLife, ...]
    """In the order in which they were heard of."""
    rates: tuple[StepRate, ...]
    slow_ranks: tuple[SlowRank, ...]
    reports: int
    """The reports of progress from which it could be told whether a rank is behind."""
    hangs: tuple[WorkersHung, ...]
    omitted_hangs: int
    takeovers: tuple[DriverReplaced, ...]
    omitted_takeovers: int


class HistoryBuilder:
    """Computes the history from the entries of the journal, one after the other."""

    def __init__(self) -> None:
        self._states = StatesBuilder()
        self._lives = LivesBuilder()
        self._rates = RatesBuilder()
        self._hangs: deque[WorkersHung] = deque(maxlen=MOST_HANGS)
        self._hang_count = 0
        self._takeovers: deque[DriverReplaced] = deque(maxlen=MOST_TAKEOVERS)
        self._takeover_count = 0

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        event = entry.event
        self._states.add(entry)
        self._lives.add(entry)
        match event:
            case Progressed():
                self._rates.add(event, self._lives.roster)
            case WorkersHung():
                self._hangs.append(event)
                self._hang_count += 1
            case DriverReplaced():
                self._takeovers.append(event)
                self._takeover_count += 1
            case _:
                pass

    def history(self, until: float = 0.0) -> RunHistory:
        """Return the history. `until`: for a run that goes on, the seconds since it began."""
        until = self._states.seconds(until)
        attempts, spans = tuple(self._states.attempts), tuple(self._states.spans(until))
        per_state = seconds_per_state(spans)
        return RunHistory(
            seconds=until,
            spans=spans,
            per_state=per_state,
            goodput=goodput(per_state),
            attempts=attempts,
            restarts=tuple(restart_costs(attempts, until)),
            nodes=tuple(self._lives.nodes.values()),
            rates=tuple(self._rates.rates),
            slow_ranks=tuple(self._rates.slow_ranks()),
            reports=self._rates.reports,
            hangs=tuple(self._hangs),
            omitted_hangs=self._hang_count - len(self._hangs),
            takeovers=tuple(self._takeovers),
            omitted_takeovers=self._takeover_count - len(self._takeovers),
        )
