"""Where the marks of the plots are."""

from __future__ import annotations

import pytest

from raylaunch.cli.html_report import plots
from raylaunch.core.history.step_rates import StepRate
from raylaunch.core.history.time_per_state import StateSpan, TimeState
from tests.cli.html_report.reports import facts, many_nodes, replay_folder, restarted_often, write_journal


@pytest.mark.parametrize("seconds", [0.3, 1, 59, 61, 3_599, 5_000, 86_400, 1e6, 3e7, 1.5e8])
def test_time_ticks(seconds):
    """A few, and none at the very end, where there is no room for its text."""
    ticks = plots.time_ticks(seconds)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == plots.PlotTick(at=0.0, text="0")
    assert all(tick.at <= 97 for tick in ticks)


def test_states():
    """Each span is one mark, unless there are more than can be seen: then columns show the parts."""
    few = [StateSpan(state=TimeState.START, begin=0, end=1), StateSpan(state=TimeState.TRAIN, begin=1, end=4)]
    assert [(mark.x, mark.width, mark.kind) for mark in plots.state_marks(few, 4.0)] == [
        (0, 25, "start"),
        (25, 75, "train"),
    ]
    states = (TimeState.TRAIN, TimeState.LOST)
    many = [StateSpan(state=states[number % 2], begin=number, end=number + 1) for number in range(1000)]
    marks = plots.state_marks(many, 1000.0)
    assert len(marks) == 2 * plots.COLUMNS
    assert (marks[0].text, marks[0].height, marks[0].y) == ("train 60%, lost 40%", pytest.approx(60), pytest.approx(40))
    assert plots.state_marks([], 0.0) == []


def test_rates():
    """The path is at 0 where there were no steps."""
    rates = [StepRate(attempt=1, begin=0, end=2, per_second=10), StepRate(attempt=1, begin=2, end=4, per_second=5)]
    rates.append(StepRate(attempt=2, begin=6, end=10, per_second=20))
    path = plots.rate_path(rates, 10.0, 20.0)
    assert path == "M0.00 100V50.00H200.00V75.00H400.00V100M600.00 100V0.00H1000.00V100"
    assert plots.rate_path([], 10.0, 1.0) == ""
    assert plots.drawn_rates(rates, 10.0) == rates


def test_many_rates():
    """A column has the mean of its steps, pauses included."""
    rates = [StepRate(attempt=at, begin=at, end=at + 0.5, per_second=10) for at in range(1000)]
    drawn = plots.drawn_rates(rates, 1000.0)
    assert len(drawn) == plots.COLUMNS
    assert {rate.per_second for rate in drawn} == {5.0}


@pytest.mark.parametrize(("most", "ceiling"), [(0.0, 1.0), (0.013, 0.015), (1.0, 1.0), (7.6, 10.0), (103.0, 150.0)])
def test_the_axis_of_rates(most, ceiling):
    """It ends with a round number."""
    assert plots.rate_ceiling([StepRate(attempt=1, begin=0, end=1, per_second=most)]) == pytest.approx(ceiling)


def test_marks_of_restarts(tmp_path):
    """Each has its own; too many are counted by place."""
    few = plots.restart_marks(facts(replay_folder(tmp_path / "few", "chaos-on-hosts")).history)
    assert (len(few), few[0].kind, few[0].text[:18]) == (37, "node-lost", "attempt 2: node lo")
    many = plots.restart_marks(facts(write_journal(tmp_path / "many", restarted_often(300))).history)
    assert len(many) == plots.MOST_MARKS
    assert many[3].text.startswith("5 restarts; attempt ")
    assert {mark.kind for mark in many} == {"failure"}
    assert plots.restart_marks(facts(write_journal(tmp_path / "none", [])).history) == []


def test_rows_of_nodes(tmp_path):
    """Each node has one; among many, those to which nothing happened share one."""
    rows, more = plots.node_rows(facts(replay_folder(tmp_path / "few", "chaos-on-hosts")).history, 40)
    assert (rows[0].name, rows[0].note, more) == ("node-1", "10.77.0.3, 2 failures, lost: its agent died", 0)
    assert [mark.kind for mark in rows[0].marks] == ["present", "works", "gone"]
    drained = next(row for row in rows if row.name == "node-29")
    assert [mark.kind for mark in drained.marks] == ["present", "works", "drains", "left"]
    wide = facts(write_journal(tmp_path / "wide", many_nodes(300))).history
    rows, more = plots.node_rows(wide, 20)
    assert (len(rows), rows[0].name, rows[0].note, more) == (21, "270 nodes", "nothing happened to them", 10)
