"""How a run spent its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import replay_files
from pytest import approx  # noqa: PT013
from written_journal import attempt, beginning, entry, steps

from raylaunch.core.history.attempt_times import AttemptTimes, Interruption, mean_rate
from raylaunch.core.history.run_history import HistoryBuilder
from raylaunch.core.history.time_per_state import (
    StatesBuilder,
    StateSpan,
    TimeState,
    goodput,
    lost_seconds,
    seconds_per_state,
    state_spans,
)
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import NodeJoined, Progressed, WorkersStarted
from raylaunch.core.record import journal


def spans(*attempts: AttemptTimes, until: float, granted_at: float = 0.0) -> list[tuple[str, float, float]]:
    found = state_spans(attempts, granted_at=granted_at, until=until)
    return [(str(span.state), span.begin, approx(span.end)) for span in found]


def test_a_run_that_lost_steps():
    """Steps that were done again do not count as training."""
    first = attempt(
        1,
        5.0,
        running_at=6.0,
        first_step_at=8.0,
        last_step_at=18.0,
        steps=101,
        lost_steps=20,
        ended_at=18.5,
        interruption=Interruption.FAILURE,
    )
    second = attempt(2, 18.5, running_at=18.7, first_step_at=19.0)
    assert spans(first, second, until=30.0, granted_at=2.0) == [
        ("wait", 0.0, 2.0),
        ("start", 2.0, 8.0),
        ("train", 8.0, 16.0),
        ("lost", 16.0, 18.5),
        ("recover", 18.5, 19.0),
        ("train", 19.0, 30.0),
    ]


def test_a_planned_restart():
    """Saving is no training; then nodes may be missing. At the end workers are stopped."""
    first = attempt(
        1, 2.0, running_at=3.0, saving_at=10.0, ended_at=11.0, stopped_at=12.0, interruption=Interruption.RESIZE
    )
    second = attempt(2, 15.0, running_at=16.0, ended_at=20.0, interruption=Interruption.STOP)
    assert spans(first, second, until=22.0) == [
        ("start", 0.0, 3.0),
        ("train", 3.0, 10.0),
        ("save", 10.0, 11.0),
        ("recover", 11.0, 12.0),
        ("wait", 12.0, 15.0),
        ("recover", 15.0, 16.0),
        ("train", 16.0, 20.0),
        ("wait", 20.0, 22.0),
    ]


def test_attempts_without_a_step():
    """Where others made steps, they were no training. Before the first step of all, the run was starting."""
    first = attempt(1, 2.0, running_at=3.0, ended_at=4.0)
    second = attempt(2, 4.0, running_at=5.0, first_step_at=6.0, last_step_at=7.0, ended_at=7.0)
    third = attempt(3, 7.0, running_at=8.0, ended_at=9.0)
    assert spans(first, second, third, until=9.0) == [("start", 0.0, 6.0), ("train", 6.0, 7.0), ("recover", 7.0, 9.0)]


def test_a_hang_is_lost_time():
    """From the last step on."""
    one = attempt(1, 0.0, first_step_at=1.0, last_step_at=2.0, ended_at=300.0, interruption=Interruption.HANG)
    assert lost_seconds(one) == 298.0
    one.lost_steps, one.steps = 1000, 1
    assert lost_seconds(one) == 299.0, "no more than there was"


def test_before_the_first_attempt():
    """A run waits for the cluster, then its agents start."""
    assert spans(until=5.0, granted_at=3.0) == [("wait", 0.0, 3.0), ("start", 3.0, 5.0)]
    assert spans(until=0.0) == []


def test_sums():
    """The seconds in each state, and the part that was training."""
    found = [
        StateSpan(state=TimeState.START, begin=0.0, end=1.0),
        StateSpan(state=TimeState.TRAIN, begin=1.0, end=4.0),
    ]
    seconds = seconds_per_state(found)
    assert seconds == dict.fromkeys(TimeState, 0.0) | {TimeState.START: 1.0, TimeState.TRAIN: 3.0}
    assert goodput(seconds) == 0.75
    assert goodput(seconds_per_state([])) is None


def test_goodput_while_nothing_happens():
    """The time since the last step is not training, until another step is made."""
    builder = StatesBuilder()
    job = Job(entrypoint=Entrypoint(script="train.py"), nproc_per_node=1, last_call=0.0)
    step = Progressed(at=3.0, attempt=1, marks=1, low=1, high=1, marked=2.0, rate=1.0)
    for each in journal.replay(
        job,
        [
            NodeJoined(at=0.0, node="node-1", address="10.0.0.1", nproc=1),
            WorkersStarted(at=1.0, attempt=1, node="node-1", pids=(1,)),
            step,
            replace(step, at=6.0, marks=5, marked=6.0),
        ],
    ):
        builder.add(each)
    still = replace(step, marked=6.0, rate=0.0)
    assert [builder.goodput(until, still) for until in (6.0, 12.0, 24.0)] == approx([4 / 6, 4 / 12, 4 / 24])
    assert builder.goodput(24.0, step) == approx(22 / 24)


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_recorded_runs(file):
    """The states of runs that were recorded have no gaps, wherever the journal ends."""
    _, entries = journal.read(file.read_text(encoding="utf-8").splitlines())
    builder = HistoryBuilder()
    for each in entries:
        builder.add(each)
        history = builder.history()
        assert sum(history.per_state.values()) == approx(history.seconds)
        ends = [0.0, *(span.end for span in history.spans)]
        assert [span.begin for span in history.spans] == ends[:-1]
        assert all(min(restart.parts.values()) >= 0 for restart in history.restarts)


def test_the_mean_rate_is_that_of_the_times_in_which_steps_were_made():
    """The first step of an attempt begins the count; without two steps there is no rate."""
    builder = StatesBuilder()
    assert mean_rate(builder.attempts) is None
    for each in (*beginning("a"), entry(steps(4.0, 1)), entry(steps(14.0, 41))):
        builder.add(each)
    assert mean_rate(builder.attempts) == 4.0
