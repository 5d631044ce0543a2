"""The history of a run as a whole."""

from __future__ import annotations

import pytest
from machine_helpers import granted, hung, replaced, started
from written_journal import beginning, entry, steps

from raylaunch.core.history.run_history import MOST_HANGS, MOST_TAKEOVERS, HistoryBuilder


def test_it_is_complete():
    """Each part is there, up to the present for a run that goes on."""
    builder = HistoryBuilder()
    entries = [
        entry(None),
        entry(granted("a", 1.5)),
        *beginning("a"),
        entry(started("a", 3.0)),
        entry(steps(4.0, 1)),
        entry(steps(6.0, 5)),
        entry(granted("b", 7.0)),
    ]
    for each in entries:
        builder.add(each)
    history = builder.history(10.0)
    assert (history.seconds, history.goodput, history.spans[0].end) == (10.0, 0.6, 1.5)
    assert [attempt.steps for attempt in history.attempts] == [5]
    assert [node.name for node in history.nodes] == ["a", "b"]
    assert [rate.per_second for rate in history.rates] == [2.0]
    assert (history.restarts, history.slow_ranks, history.reports, history.hangs) == ((), (), 1, ())
    assert builder.history().seconds == 7.0


def test_the_last_hangs_are_kept():
    """Their stacks may be long."""
    builder = HistoryBuilder()
    for each in beginning("a"):
        builder.add(each)
    for number in range(MOST_HANGS + 3):
        builder.add(entry(hung("a", 5.0 + number)))
    history = builder.history()
    assert (len(history.hangs), history.omitted_hangs, history.hangs[-1].at) == (MOST_HANGS, 3, 7.0 + MOST_HANGS)


def test_the_last_takeovers_are_kept():
    """With the seconds of their phases."""
    builder = HistoryBuilder()
    for number in range(MOST_TAKEOVERS + 3):
        builder.add(entry(replaced(1.0 + number, driver=2 + number)))
    history = builder.history()
    assert (len(history.takeovers), history.omitted_takeovers) == (MOST_TAKEOVERS, 3)
    assert history.takeovers[0].driver == 5
    assert history.takeovers[0].seconds == pytest.approx(1.25)
    assert history.takeovers[0].phases == (
        "0.90 s until its process ran, 0.10 s for the state, 0.20 s to prepare, 0.05 s until all agents obeyed"
    )
