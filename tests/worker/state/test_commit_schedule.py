"""After which steps `State` commits."""

from __future__ import annotations

import pytest

from raylaunch.worker.state.commit_schedule import CommitSchedule


def committed_steps(schedule: CommitSchedule, steps: int, interval: int = 1) -> list[int]:
    found = []
    for completed in range(1, steps + 1):
        if schedule.is_due(completed):
            found.append(completed)
            schedule.committed(completed, interval)
    return found


@pytest.mark.parametrize(
    ("every", "interval", "found"),
    [(1, 9, [1, 2, 3, 4, 5, 6]), (3, 9, [3, 6]), ("auto", 1, [1, 2, 3, 4, 5, 6]), ("auto", 3, [1, 4])],
)
def test_commits_are_due(every, interval, found):
    """With `auto` the interval is what all ranks have agreed on."""
    assert committed_steps(CommitSchedule(every), 6, interval) == found


@pytest.mark.parametrize(
    ("every", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("often", TypeError)]
)
def test_other_values_are_refused(every, error):
    with pytest.raises(error, match="`every` is"):
        CommitSchedule(every)


@pytest.mark.parametrize(("cost", "interval"), [(0.0001, 1), (0.002, 1), (0.0021, 2), (0.01, 5), (1.0, 500)])
def test_auto_costs_two_percent_of_the_time_at_most(cost, interval):
    """Steps of 100 ms; the time in `commit` is not counted, and one slow step changes nothing."""
    schedule, now = CommitSchedule("auto"), 0.0
    for step in range(9):
        schedule.step_ended(now)
        schedule.step_begins(now + cost)
        now += cost + (30.0 if step == 4 else 0.1)
    assert schedule.step_seconds == pytest.approx(0.1)
    assert schedule.proposed_interval(3, cost) == interval


def test_first_commits_are_not_measured():
    """They fill the pages of the buffers."""
    schedule = CommitSchedule("auto")
    schedule.step_begins(0.0)
    schedule.step_ended(1.0)
    assert [schedule.proposed_interval(number, 1.0) for number in (1, 2, 3)] == [1, 1, 50]
