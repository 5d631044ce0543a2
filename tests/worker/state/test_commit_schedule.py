"""After which steps `State` commits."""

from __future__ import annotations

import pytest

from raylaunch.worker.state.elastic_state import CommitSchedule


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


@pytest.mark.parametrize(("cost", "interval"), [(0.0001, 1), (0.0018, 1), (0.0019, 2), (0.01, 6), (1.0, 556)])
def test_auto_costs_two_percent_of_the_time_at_most(cost, interval):
    """Steps of 100 ms; the time in `commit` is not counted, and one slow step changes nothing."""
    schedule, now = CommitSchedule("auto"), 0.0
    schedule.committed(0, 200)
    for step in range(9):
        schedule.step_ended(now)
        schedule.step_begins(now + cost)
        now += cost + (30.0 if step == 4 else 0.1)
    assert schedule.step_seconds == pytest.approx(0.1)
    assert schedule.proposed_interval(3, cost) == interval


def test_what_was_restored_says_how_often_to_commit():
    """The first commit comes sooner; until others are measured, the interval is that of the attempt before."""
    schedule = CommitSchedule("auto")
    schedule.restored(100, 192)
    assert next(step for step in range(101, 120) if schedule.is_due(step)) == 103
    schedule.committed(103, schedule.proposed_interval(1, 1.0))
    assert next(step for step in range(104, 300) if schedule.is_due(step)) == 295


@pytest.mark.parametrize("every", [1, 3])
def test_a_fixed_interval_is_that_after_a_restore_too(every):
    schedule = CommitSchedule(every)
    schedule.restored(100, 20)
    assert [step for step in range(101, 107) if schedule.is_due(step)] == [
        step for step in range(101, 107) if step % every == 0
    ]


def test_first_commits_are_not_measured():
    """They fill the pages of the buffers."""
    schedule = CommitSchedule("auto")
    schedule.step_begins(0.0)
    schedule.step_ended(1.0)
    schedule.committed(0, 50)
    assert [schedule.proposed_interval(number, 1.0) for number in (1, 2, 3)] == [50, 50, 56]


def test_the_interval_grows_step_by_step():
    """The first commit that is measured may be slow by chance, and that would be found out at the end of the interval."""
    schedule = CommitSchedule("auto")
    schedule.step_begins(0.0)
    schedule.step_ended(1.0)
    assert [proposed(schedule, cost) for cost in (10.0, 0.01, 0.01)] == [4, 16, 64]


def test_one_commit_that_takes_long_does_not_decide_alone():
    """As on a busy machine: the interval is that of the mean of the last ones."""
    schedule = CommitSchedule("auto")
    schedule.step_begins(0.0)
    schedule.step_ended(1.0)
    schedule.committed(0, 100)
    assert [proposed(schedule, cost) for cost in (1.0, 5.0, 0.0, 2.0)] == [56, 224, 112, 112]


def proposed(schedule: CommitSchedule, cost: float) -> int:
    """Return what is proposed with a commit, which all ranks agree on at once."""
    interval = schedule.proposed_interval(3, cost)
    schedule.committed(0, interval)
    return interval


@pytest.mark.parametrize(("commit", "call", "share"), [(0.03, 0.0, 0.018), (0.03, 0.0002, 0.018), (0.3, 0.0, 0.018)])
def test_all_that_calls_take_is_within_the_share(commit, call, share):
    """Also what the measured cost does not include, here half of each commit, and calls that commit nothing."""
    schedule, now, spent, number, interval, began = CommitSchedule("auto"), 0.0, 0.0, 0, 1, 0.0
    for step in range(1, 40_000):
        now += 0.02
        schedule.step_ended(now)
        took = call
        if schedule.is_due(step):
            number += 1
            schedule.committed(step, interval)
            interval = schedule.proposed_interval(number, commit / 2)
            took += commit
        if number == 5:
            began = began or now
        now += took
        spent += took if began else 0.0
        schedule.step_begins(now)
    assert spent / (now - began) == pytest.approx(share, rel=0.1)


# Light commits.


def light_steps(schedule: CommitSchedule, steps: int) -> list[int]:
    return [completed for completed in range(1, steps + 1) if schedule.is_light_due(completed)]


@pytest.mark.parametrize("every", [1, 3])
def test_light_commits_are_made_with_auto_only(every):
    """A script that says after which steps it commits gets these commits, and no others."""
    schedule = CommitSchedule(every)
    schedule.committed(1, 5, 2)
    assert light_steps(schedule, 9) == []


def test_light_commits_follow_each_step_until_all_ranks_have_agreed_on_fewer():
    """All ranks make them after the same steps, whatever they are committed after, and say how often others are."""
    schedule = CommitSchedule("auto")
    assert light_steps(schedule, 4) == [1, 2, 3, 4]
    schedule.committed(2, 40, 3)
    assert (light_steps(schedule, 10), schedule.interval) == ([3, 6, 9], 40)
    schedule.committed(42, 30)
    assert (light_steps(schedule, 3), schedule.interval) == ([1, 2, 3], 30)


@pytest.mark.parametrize(
    ("cost", "interval"), [(0.0001, 1), (0.0013, 1), (0.0014, 2), (0.0052, 4), (0.0053, 0), (1.6, 0)]
)
def test_light_commits_take_a_share_of_the_time_at_most(cost, interval):
    """Steps of 100 ms; what one of them takes in the worst case does not matter."""
    schedule, now = CommitSchedule("auto"), 0.0
    for number in range(20):
        assert schedule.proposed_light_interval == (interval if number > 15 else 1)
        schedule.step_ended(now)
        schedule.light_committed(9.0 if number == 7 else cost * 0.9999)
        schedule.step_begins(now)
        now += 0.1
    assert schedule.light_seconds == cost * 0.9999


def test_until_enough_light_commits_are_measured_their_interval_stays():
    schedule = CommitSchedule("auto")
    schedule.committed(1, 40, 7)
    schedule.light_committed(1.0)
    assert (schedule.proposed_light_interval, CommitSchedule("auto").light_seconds) == (7, 0.0)


def test_beside_light_commits_others_cost_less():
    """Since what is lost with all workers, or with a host, is rarely needed."""
    found = []
    for light in (False, True):
        schedule = CommitSchedule("auto")
        schedule.step_begins(0.0)
        schedule.step_ended(1.0)
        schedule.committed(0, 600)
        if light:
            schedule.light_committed(0.001)
        found.append(schedule.proposed_interval(3, 1.8))
    assert found == [100, 450]


@pytest.mark.parametrize(
    ("commit", "light", "share"),
    [(0.03, 0.0001, 0.004), (0.03, 0.002, 0.018), (0.1, 0.0005, 0.018 - 0.0125), (0.1, 0.0003, 0.018 - 0.0075)],
)
def test_light_commits_and_others_take_a_share_each(commit, light, share):
    """As `State` calls it, on steps of 20 ms. Of others, only half of what they take is measured.

    They take more if there is no light commit after each step, and then what light ones leave.
    """
    schedule, now, whole, lights, number, intervals, began = CommitSchedule("auto"), 0.0, 0.0, 0.0, 0, (1, 1), 0.0
    for step in range(1, 60_000):
        now += 0.02
        schedule.step_ended(now)
        if schedule.is_due(step):
            number += 1
            schedule.committed(step, *intervals)
            intervals = schedule.proposed_interval(number, commit / 2), schedule.proposed_light_interval
            now += commit
            whole += commit if began else 0.0
        elif number and schedule.is_light_due(step):
            schedule.light_committed(light)
            now += light
            lights += light if began else 0.0
        if number == 6:
            began = began or now
        schedule.step_begins(now)
    assert whole / (now - began) == pytest.approx(share, rel=0.15)
    assert lights / (now - began) <= 0.013
