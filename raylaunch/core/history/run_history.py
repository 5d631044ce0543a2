"""The history of a run: its states, attempts, restarts, nodes and steps over time."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.history.attempt_times import AttemptTimes
from raylaunch.core.history.node_lives import LivesBuilder, NodeLife
from raylaunch.core.history.restart_cost import RestartCost, restart_costs
from raylaunch.core.history.step_rates import RatesBuilder, SlowRank, StepRate
from raylaunch.core.history.time_per_state import StatesBuilder, StateSpan, TimeState, goodput, seconds_per_state
from raylaunch.core.machine.events_and_actions import Progressed, WorkersHung
from raylaunch.core.record.journal import JournalEntry

MOST_HANGS = 20
"""So many of the last hangs are kept with their stacks."""
MOST_TAKEOVERS = 50
"""So many of the last takeovers are kept."""


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
        self._hangs: list[WorkersHung] = []
        self._omitted_hangs = 0
        self._takeovers: list[DriverReplaced] = []
        self._omitted_takeovers = 0

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
                if len(self._hangs) > MOST_HANGS:
                    del self._hangs[0]
                    self._omitted_hangs += 1
            case DriverReplaced():
                self._takeovers.append(event)
                if len(self._takeovers) > MOST_TAKEOVERS:
                    del self._takeovers[0]
                    self._omitted_takeovers += 1
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
            omitted_hangs=self._omitted_hangs,
            takeovers=tuple(self._takeovers),
            omitted_takeovers=self._omitted_takeovers,
        )
