"""The life of each node."""

from __future__ import annotations

from machine_helpers import draining, failed, failure, granted, hung, joined, lost, stopped
from written_journal import beginning, entry, launch

from raylaunch.core.history.run_history import LivesBuilder, NodeLife
from raylaunch.core.machine.events_and_actions import Release
from raylaunch.core.record.journal import JournalEntry


def lives(*entries: JournalEntry) -> dict[str, NodeLife]:
    builder = LivesBuilder()
    for each in entries:
        builder.add(each)
    return builder.nodes


def test_attempts_that_follow_each_other_are_one_span():
    """A node may leave the world and come back."""
    found = lives(
        entry(None),
        entry(granted("a", 1.0)),
        *beginning("a", "b"),
        entry(failed("a", 5.0), launch(2, "b", "a")),
        entry(failed("a", 6.0), launch(3, "a", "unknown")),
        entry(failed("a", 7.0), launch(4, "a", "b")),
    )
    assert found["a"].attempts == [(1, 4)]
    assert found["b"].attempts == [(1, 2), (4, 4)]
    assert (found["a"].begin, found["b"].begin, found["a"].joined_at) == (1.0, 2.0, 2.0)
    assert (found["a"].failures, found["a"].is_eventful, found["b"].is_eventful) == (3, True, False)


def test_how_nodes_leave():
    """They are lost, or sent away, or given up before they are ready. What is heard of them later changes nothing."""
    found = lives(
        *beginning("a", "b"),
        entry(granted("d", 2.5)),
        entry(lost("d", 2.6)),
        entry(draining("a", 3.0)),
        entry(draining("a", 3.5), Release(node="a", why="it is being drained")),
        entry(lost("a", 4.0)),
        entry(draining("a", 4.5)),
        entry(lost("b", 5.0)),
        entry(lost("c", 5.0), Release(node="c", why="it is unknown")),
        entry(draining("c", 5.0)),
    )
    assert (found["a"].draining_at, found["a"].left_at, found["a"].is_lost) == (3.0, 3.5, False)
    assert (found["a"].why_left, found["b"].why_left) == ("it is being drained", "its agent died")
    assert (found["b"].left_at, found["b"].is_lost) == (5.0, True)
    assert (found["d"].left_at, found["d"].is_lost) == (2.6, False)
    assert found.keys() == {"a", "b", "d"}


def test_failures_that_follow_from_others_do_not_count():
    """Nor does the end of workers that raylaunch stopped, nor a node that never joined."""
    found = lives(
        *beginning("a"),
        entry(stopped("a", 3.0, failure("a", 3.0, stopped=True), failure("b", 3.0))),
        entry(hung("a", 4.0, waited=True, hung="no step")),
        entry(hung("a", 5.0, hung="no step")),
    )
    assert found["a"].failures == 1


def test_a_node_without_a_time():
    """It is there from the beginning."""
    assert NodeLife(name="a", address="").begin == 0.0
    assert lives(entry(joined("a", 3.0)))["a"].begin == 3.0
