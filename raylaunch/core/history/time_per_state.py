"""How a run spent its time: which part of it was training that counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raylaunch.core.history.attempt_times import AttemptTimes, Interruption, TimesBuilder
from raylaunch.core.machine.events_and_actions import NodeGranted, Progressed
from raylaunch.core.newtypes import StrEnum
from raylaunch.core.record.journal import JournalEntry


class TimeState(StrEnum):
    """What a run did at a time."""

    TRAIN = "train"
    """Workers made steps that count or, in a script without steps, all of them ran."""
    START = "start"
    """Agents and workers started, until all workers had done the first step of the run."""
    RECOVER = "recover"
    """The same after an attempt ended, from the decision to end it."""
    SAVE = "save"
    """Workers were asked to save before they were ended."""
    WAIT = "wait"
    """Waited for nodes, before a script that crashes in a loop was started again, or for workers to end at last."""
    LOST = "lost"
    """Workers made steps that were done again later, or they hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpan:
    """A time in one state, in seconds since the run began."""

    state: TimeState
    begin: float
    end: float


class _Spans:
    def __init__(self, until: float) -> None:
        self.found: list[StateSpan] = []
        self._until = until
        self._now = 0.0

    def add(self, state: TimeState, end: float) -> None:
        """Add the state from the end of the one before."""
        end = min(end, self._until)
        if end <= self._now:
            return
        if self.found and self.found[-1].state is state:
            self.found[-1] = StateSpan(state=state, begin=self.found[-1].begin, end=end)
        else:
            self.found.append(StateSpan(state=state, begin=self._now, end=end))
        self._now = end


def state_spans(attempts: Sequence[AttemptTimes], *, granted_at: float, until: float) -> list[StateSpan]:
    """Return the states of a run from its beginning until a time, without gaps, each different from the one before.

    `granted_at`: when the cluster had given the resources of the first attempt.
    """
    has_steps = any(attempt.first_step_at is not None for attempt in attempts)
    spans, getting_ready = _Spans(until), TimeState.START
    spans.add(TimeState.WAIT, granted_at)
    for index, attempt in enumerate(attempts):
        is_last = index == len(attempts) - 1
        spans.add(TimeState.WAIT if index else TimeState.START, attempt.launched_at)
        ended = until if attempt.ended_at is None else attempt.ended_at
        trains_from = attempt.first_step_at if has_steps else attempt.running_at
        if trains_from is not None:
            spans.add(getting_ready, trains_from)
            saving = ended if attempt.saving_at is None else attempt.saving_at
            spans.add(TimeState.TRAIN, saving - lost_seconds(attempt))
            spans.add(TimeState.LOST, saving)
            spans.add(TimeState.SAVE, ended)
            getting_ready = TimeState.RECOVER
        spans.add(getting_ready, ended)
        spans.add(TimeState.WAIT if is_last else TimeState.RECOVER, attempt.stopped_at or ended)
    spans.add(TimeState.WAIT if attempts else TimeState.START, until)
    return spans.found


def lost_seconds(attempt: AttemptTimes) -> float:
    """Return how much of the end of an attempt was lost: its steps were done again, or its workers hung."""
    first, last = attempt.first_step_at, attempt.last_step_at
    if attempt.ended_at is None or first is None or last is None:
        return 0.0
    lost_from = last if attempt.interruption is Interruption.HANG else attempt.ended_at
    if attempt.lost_steps:
        lost_from = max(first, last - attempt.lost_steps * (last - first) / max(1, attempt.steps - 1))
    return max(0.0, (attempt.saving_at or attempt.ended_at) - lost_from)


def seconds_per_state(spans: Iterable[StateSpan]) -> dict[TimeState, float]:
    """Return the seconds in each state, in the order of `TimeState`."""
    seconds = dict.fromkeys(TimeState, 0.0)
    for span in spans:
        seconds[span.state] += span.end - span.begin
    return seconds


def goodput(seconds: dict[TimeState, float]) -> float | None:
    """Return the part of the time in which the run trained, from 0 to 1; None if no time has passed."""
    total = sum(seconds.values())
    return seconds[TimeState.TRAIN] / total if total > 0 else None


class StatesBuilder:
    """Computes the states of a run from the entries of the journal, one after the other."""

    def __init__(self) -> None:
        self._times = TimesBuilder()
        self._granted_at = 0.0
        #: The time of the latest event, in seconds since the run began.
        self._now = 0.0

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        if entry.event is not None:
            self._now = max(self._now, entry.event.at)
        if isinstance(entry.event, NodeGranted) and not self.attempts:
            self._granted_at = entry.event.at
        self._times.add(entry)

    @property
    def attempts(self) -> Sequence[AttemptTimes]:
        """The times of all attempts."""
        return self._times.attempts

    def seconds(self, until: float = 0.0) -> float:
        """Return how far the journal goes. `until`: for a run that goes on, the seconds since it began."""
        return max(self._now, until)

    def spans(self, until: float = 0.0) -> list[StateSpan]:
        """Return the states of the run, as `state_spans` does."""
        return state_spans(self.attempts, granted_at=self._granted_at, until=self.seconds(until))

    def goodput(self, until: float = 0.0, progress: Progressed | None = None) -> float | None:
        """Return the part of the time in which the run trained; None if no time has passed.

        `progress`: how far the present attempt is. While it makes no steps, the time since the last one counts as lost.
        """
        seconds = seconds_per_state(self.spans(until))
        if progress is not None and progress.rate <= 0:
            stalled = min(self.seconds(until) - progress.marked, seconds[TimeState.TRAIN])
            seconds[TimeState.TRAIN] -= max(0.0, stalled)
            seconds[TimeState.LOST] += max(0.0, stalled)
        return goodput(seconds)
