"""What a node tells the driver: the newest status has all that is true."""

from __future__ import annotations

from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.node.protocol.node_goal import CapabilitySection
from raylaunch.node.protocol.node_status import (
    AgentReady,
    ManifestChanged,
    NodeStatus,
    NodeWarning,
    Ready,
    StatusFeed,
    StepProposed,
    StoreOpened,
)

UP = AgentReady(
    host="h", address="10.0.0.1", nproc=2, ready=Ready(start_method="forkserver", why=(), torch=True, pid=1)
)


def after(*events):
    status = NodeStatus()
    for event in events:
        status = status.after(event)
    return status


def forked(attempt):
    return WorkersStatus(attempt=attempt, pids=(attempt, 7))


def test_everything_stays_until_something_newer_comes():
    proposed = StepProposed(node="a", attempt=1, step=5, reached=4)
    status = after(UP, forked(1), forked(2), proposed)
    assert (status.up, status.proposed, status.generation) == (UP, proposed, 4)
    assert status.workers == forked(2)


def test_the_newest_section_of_each_capability_counts():
    told = [CapabilitySection(capability=name, body=body) for name, body in (("a", b"1"), ("b", b"2"), ("a", b"3"))]
    assert after(*told).sections == {"a": b"3", "b": b"2"}


def test_stores_are_kept_for_this_attempt_and_later_ones():
    """The next attempt's store is opened while this one trains."""
    stores = [StoreOpened(attempt=number, port=5000 + number) for number in (1, 2, 3)]
    status = after(*stores[:2], forked(1), stores[2])
    assert [store.opened.attempt for store in status.stores] == [1, 2, 3]
    assert [store.opened.attempt for store in status.after(forked(2)).stores] == [2, 3]


def test_a_store_that_cannot_be_opened_twice():
    """The second answer is told from the first one, though it is the same."""
    failed = StoreOpened(attempt=1, port=0, why="address in use")
    (first,), (second,) = after(failed).stores, after(failed, failed).stores
    assert (first.opened, first.generation, second.generation) == (failed, 1, 2)


def test_a_warning_is_kept_once():
    status = after(ManifestChanged(manifest=None, why="no"), NodeWarning(why="cut"), NodeWarning(why="cut"))
    assert status.warnings == ("no", "cut")
    assert status.after(ManifestChanged(manifest=None, why="")) is status


def test_warnings_are_bounded():
    assert after(*(NodeWarning(why=str(number)) for number in range(99))).warnings[0] == "49"


def test_each_driver_is_told_all_once():
    """One that has taken over is told what the last one knew."""
    feed = StatusFeed(1)
    feed.add(UP)
    assert not feed.is_asked_first(1)
    assert (feed.news(1).up, feed.news(1)) == (UP, None)
    assert feed.is_asked_first(2)
    assert (feed.news(2).up, feed.news(2)) == (UP, None)
    feed.add(forked(1))
    assert feed.news(2).workers.attempt == 1
