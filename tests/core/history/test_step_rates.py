"""How fast the steps were, and which ranks were behind."""

from __future__ import annotations

from written_journal import steps

from raylaunch.core.history.step_rates import MIN_SECONDS, RatesBuilder, SlowRank, StepRate

NODES = (("a", 2), ("b", 2))


def built(*reports, nodes=NODES) -> RatesBuilder:
    builder = RatesBuilder()
    for report in reports:
        builder.add(report, nodes)
    return builder


def test_the_rate_between_two_reports():
    """From the first step of an attempt on. A time without steps lowers the rate."""
    found = built(steps(1.0, 1), steps(3.0, 5), steps(13.0, 10), steps(21.0, 3, attempt=2)).rates
    assert found == [
        StepRate(attempt=1, begin=1.0, end=3.0, per_second=2.0),
        StepRate(attempt=1, begin=3.0, end=13.0, per_second=0.5),
    ]


def test_one_report_of_many_steps():
    """It says itself how fast they were."""
    assert built(steps(1.0, 11, rate=2.0)).rates == [StepRate(attempt=1, begin=1.0, end=6.0, per_second=2.0)]


def test_very_short_times_have_no_rate():
    """They are part of the next one."""
    found = built(steps(1.0, 1), steps(1.0 + MIN_SECONDS / 2, 9), steps(3.0, 11)).rates
    assert found == [StepRate(attempt=1, begin=1.0, end=3.0, per_second=5.0)]


def test_ranks_that_are_behind():
    """By more than a step, the one that was so most often first. The first report only says who began last."""
    builder = built(
        steps(1.0, 9, low=0, slowest=0),
        steps(2.0, 20, low=15, slowest=3),
        steps(3.0, 30, low=29, slowest=0),
        steps(4.0, 40, low=30, slowest=0),
        steps(5.0, 50, low=42, slowest=3),
        steps(6.0, 60, low=58, slowest=7),
    )
    assert builder.reports == 5
    assert builder.slow_ranks() == [
        SlowRank(rank=3, node="b", reports=2, most_behind=7, last_at=5.0),
        SlowRank(rank=0, node="a", reports=1, most_behind=9, last_at=4.0),
    ]
    assert built(steps(1.0, 9), steps(2.0, 20, low=1, slowest=9)).slow_ranks()[0].node == ""
