"""What the table of the benches says of goals: it must not call missed what is met, nor the other way round."""

from __future__ import annotations

import pytest

from tools.bench import figures, tables
from tools.bench.contenders import RAY_TRAIN, RAYLAUNCH, TORCHRUN
from tools.bench.figures import Figure, Goal, Outcome


def figure(*goals: Goal, more_is_better: bool = False, **samples: tuple[float, ...] | str) -> Figure:
    names = {"ours": RAYLAUNCH, "torchrun": TORCHRUN, "ray_train": RAY_TRAIN}
    named = {names[name]: found for name, found in samples.items()}
    return Figure(name="x", what="", unit="s", samples=named, goals=goals, more_is_better=more_is_better)


@pytest.mark.parametrize(
    ("goal", "met", "missed"),
    [
        (figures.median_at_most(0.2), (0.1, 0.2, 0.9), (0.1, 0.21, 0.3)),
        (figures.worst_at_most(0.9), (0.1, 0.9), (0.1, 0.91)),
        (figures.worst_to_median(3), (1.0, 1.0, 3.0), (1.0, 1.0, 3.1)),
        (figures.times_better(10), (0.4,), (0.41,)),
        (figures.ratio(0.1), (0.4,), (0.41,)),
        (figures.median_at_least(2), (2.0,), (1.9,)),
    ],
)
def test_a_goal_is_met_up_to_its_bound(goal: Goal, met: tuple[float, ...], missed: tuple[float, ...]) -> None:
    """torchrun takes 4."""
    assert goal.met(figure(ours=met, torchrun=(3.0, 4.0, 5.0)))
    assert goal.met(figure(ours=missed, torchrun=(3.0, 4.0, 5.0))) is False


def test_where_more_is_better_the_ratio_is_the_other_way_round_and_the_worst_is_the_least() -> None:
    more = figure(ours=(300.0, 200.0), torchrun=(100.0,), more_is_better=True)

    assert (more.times_better(TORCHRUN), more.worst(RAYLAUNCH)) == (2.5, 200.0)


def test_a_peer_without_samples_meets_and_misses_nothing() -> None:
    goals = (figures.times_better(100, RAY_TRAIN), figures.times_better(2))
    text = tables.text([Outcome(figures=(figure(*goals, ours=(1.0,), torchrun="hung, 1 of 1"),))])

    assert text.count("not measured") == 2
    assert "hung, 1 of 1" in text


def test_both_tables_say_the_same() -> None:
    found = figure(figures.times_better(25), figures.median_at_most(0.1), ours=(0.2, 0.2, 0.7), torchrun=(4.6,))
    cells = ("0.200/0.700 (3)", "4.600/4.600 (1)", "23.0 x", ">= 25 x torchrun", "MISSED: 23.0", "MISSED: 0.200")

    for table in (tables.text([Outcome(figures=(found,))]), tables.markdown([found.record()])):
        assert [cell for cell in cells if cell not in table] == []
