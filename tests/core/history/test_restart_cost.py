"""What each restart cost, by its parts."""

from __future__ import annotations

from pytest import approx  # noqa: PT013
from written_journal import attempt

from raylaunch.core.history.attempt_times import Interruption
from raylaunch.core.history.run_history import restart_costs


def test_a_failure():
    """From the last step to the first."""
    before = attempt(
        1,
        2.0,
        first_step_at=3.0,
        last_step_at=9.0,
        steps=61,
        lost_steps=10,
        ended_at=9.5,
        interruption=Interruption.FAILURE,
    )
    after = attempt(2, 9.6, running_at=9.8, first_step_at=10.5, last_step_at=11.0, steps=5)
    (cost,) = restart_costs([before, after], 20.0)
    parts = {"detect": 0.5, "save": 0, "stop": 0, "wait": 0.1, "launch": 0.2, "first step": 0.7}
    assert {str(part): seconds for part, seconds in cost.parts.items()} == approx(parts)
    assert (cost.attempt, cost.at, cost.interruption, cost.lost_steps) == (2, 9.5, Interruption.FAILURE, 10)
    assert cost.lost == approx(1.5)
    assert cost.seconds == approx(1.5)


def test_a_planned_restart():
    """The time until it was decided costs nothing: workers made steps."""
    before = attempt(
        1, 2.0, last_step_at=5.0, saving_at=9.0, ended_at=10.0, stopped_at=11.0, interruption=Interruption.RESIZE
    )
    after = attempt(2, 13.0)
    (cost,) = restart_costs([before, after], 20.0)
    assert list(cost.parts.values()) == [0.0, 1.0, 1.0, 2.0, 7.0, 0.0]


def test_an_attempt_that_failed_before_its_first_step():
    """Its whole time is part of the cost. An attempt of which no end is known ended with the next one."""
    first, second, third = attempt(1, 1.0, steps=4), attempt(2, 3.0, running_at=4.0, ended_at=6.0), attempt(3, 6.0)
    costs = restart_costs([first, second, third], 8.0)
    assert [list(cost.parts.values()) for cost in costs] == [[0, 0, 0, 0, 1.0, 2.0], [0, 0, 0, 0, 2.0, 0.0]]
    assert restart_costs([first], 8.0) == restart_costs([], 8.0) == []
