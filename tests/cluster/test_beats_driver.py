"""The driver with a fake fleet: who is believed for how long, and what becomes of what the others say."""

from __future__ import annotations

import time

import pytest

from raylaunch.cluster.agent import Words
from raylaunch.cluster.driver import Driver
from raylaunch.cluster.fleet import Draining, Gone, Granted, Heard, Hopeless
from raylaunch.cluster.lifeline import Severed
from raylaunch.core.events import NodeDraining, NodeGranted, NodeJoined, NodeLost, WorkersExited
from raylaunch.core.failure import Failure
from raylaunch.core.job import Entrypoint, Job
from raylaunch.errors import ClusterError
from tests.fakes import FakeFleet, Notebook


class Lines:
    """Lifelines that hold until they are told otherwise."""

    def __init__(self, *nodes: str) -> None:
        self.held = set(nodes)
        self.let: list[str] = []
        self.tell = lambda _: None

    def start(self, tell) -> None:
        self.tell = tell

    def holds(self, node: str) -> bool:
        return node in self.held

    def let_go(self, node: str) -> None:
        self.let.append(node)


def driver_of(fleet: FakeFleet, *, lines: Lines | None = None, **job):
    book = Notebook()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    return Driver(asked, "run", fleet, book, book, time.monotonic(), lines), book


def events(book: Notebook, kind: type):
    return [entry.event for entry in book.entries if isinstance(entry.event, kind)]


def beat(fleet: FakeFleet, node: str) -> None:
    fleet.tell(Heard(node=node, words=Words(now=0.0), at=time.monotonic()))


def replaced_by(fleet: FakeFleet, node: str):
    """Another agent comes up wherever one is replaced."""
    seen: list[Gone] = []

    def replace(gone: Gone) -> None:
        seen.append(gone)
        fleet.lose(gone.node)
        fleet.join(node)

    fleet.replace = replace
    return seen


def failed(node: str, attempt: int) -> WorkersExited:
    failure = Failure(attempt=attempt, node=node, rank=0, local_rank=0, pid=1, at=0.0, exit_code=1)
    return WorkersExited(at=0.0, attempt=attempt, node=node, failures=(failure,))


def test_a_node_of_which_nothing_is_heard_is_lost():
    """Its place is manned again, and no restart is spent."""
    fleet = FakeFleet(1)
    fleet.then[1] = lambda: None
    seen = replaced_by(fleet, "node-2")
    driver, book = driver_of(fleet, node_timeout=1.0)
    assert driver.run().exit_code == 0
    (lost,) = events(book, NodeLost)
    assert (lost.node, lost.why) == ("node-1", "nothing was heard of it for 1 s")
    (gone,) = seen
    assert gone.silent
    assert (driver.machine.attempt, driver.machine.restarts) == (2, 0)


def test_a_node_that_beats_is_not_lost():
    """Also where it beats while the terminal keeps us waiting for longer than that."""
    fleet = FakeFleet(1)
    driver, book = driver_of(fleet, node_timeout=1.0)

    def write_slowly(_):
        for _ in range(20):
            time.sleep(0.07)
            beat(fleet, "node-1")
        fleet.finish()

    book.wrote = write_slowly
    fleet.then[1] = lambda: fleet.say("node-1", output=["anything"])
    assert driver.run().exit_code == 0
    assert events(book, NodeLost) == []


def test_nothing_of_a_lost_node_is_believed():
    """Neither that its workers failed, nor that it is up, nor that it is gone once more."""
    fleet = FakeFleet(1)
    fleet.then[1] = lambda: fleet.lose("node-1")

    def late(gone: Gone) -> None:
        fleet.say("node-1", failed("node-1", 1))
        fleet.join("node-1")
        fleet.tell(Granted(node="node-1", host="h", address="10.0.0.1"))
        fleet.lose("node-1")
        fleet.join("node-2")

    fleet.replace = late
    driver, book = driver_of(fleet)
    assert driver.run().exit_code == 0
    assert [event.node for event in events(book, NodeJoined)] == ["node-1", "node-2"]
    assert len(events(book, NodeLost)) == 1
    assert events(book, NodeGranted) == []
    assert [event.node for event in events(book, WorkersExited)] == ["node-2"]


def test_a_node_that_ray_gives_up_may_still_train():
    """It is told to end; only when its process is gone does the next attempt begin."""
    fleet = FakeFleet(1)
    lines = Lines("node-1")
    order: list[str] = []

    def let_go(node: str) -> None:
        order.append(f"let go of {node}")
        if len(order) == 1:
            lines.tell(Severed(node=node))

    lines.let_go = let_go
    fleet.then[1] = lambda: fleet.lose("node-1")
    fleet.replace = lambda gone: (order.append(f"replace {gone.node}"), fleet.join("node-2"))
    driver, book = driver_of(fleet, lines=lines)
    assert driver.run().exit_code == 0
    assert order == ["let go of node-1", "let go of node-1", "replace node-1"]
    assert [event.why for event in events(book, NodeLost)] == ["its agent died"]


def test_the_end_of_its_line_is_the_loss_of_a_node():
    """Ray takes seconds to say so of a host that died; when it does, that is no news."""
    fleet = FakeFleet(1)
    lines = Lines()
    fleet.then[1] = lambda: lines.tell(Severed(node="node-1"))
    fleet.replace = lambda gone: (fleet.lose("node-1"), fleet.join("node-2"))
    driver, book = driver_of(fleet, lines=lines)
    assert driver.run().exit_code == 0
    assert [event.node for event in events(book, NodeLost)] == ["node-1"]


def test_a_run_that_has_become_hopeless_ends_at_once():
    """Whatever its nodes do."""
    fleet = FakeFleet(1)
    fleet.then[1] = lambda: fleet.tell(Hopeless(error=ClusterError("the head is gone")))
    driver, _ = driver_of(fleet)
    with pytest.raises(ClusterError, match="the head is gone"):
        driver.run()


def test_a_granted_place_is_told_of():
    fleet = FakeFleet(1)
    start = fleet.start

    def grant_and_start(tell):
        tell(Granted(node="node-1", host="id-node-1", address="10.0.0.1"))
        start(tell)

    fleet.start = grant_and_start
    driver, book = driver_of(fleet)
    driver.run()
    (granted,) = events(book, NodeGranted)
    assert (granted.node, granted.address) == ("node-1", "10.0.0.1")
    (joined,) = events(book, NodeJoined)
    assert joined.host == "id-node-1"


def test_a_drain_is_told_of_every_node_on_the_host():
    """With its deadline in seconds since the run began; also of those that come up there later."""
    fleet = FakeFleet(2)

    def start_with_a_notice(tell):
        fleet.tell = tell
        fleet.join("node-1")
        tell(Draining(host="id-node-1", deadline=time.monotonic() + 100.0, why="preemption"))
        tell(Draining(host="id-node-2", deadline=time.monotonic() + 200.0, why="maintenance"))
        fleet.join("node-2")

    fleet.start = start_with_a_notice
    driver, book = driver_of(fleet, placement_timeout=0.1)
    assert driver.run().exit_code == 3
    drained = events(book, NodeDraining)
    assert [(event.node, event.why) for event in drained] == [("node-1", "preemption"), ("node-2", "maintenance")]
    assert [event.deadline for event in drained] == [pytest.approx(100.0, abs=5), pytest.approx(200.0, abs=5)]


def test_a_deadline_is_not_kept_before_what_came_in_time_is_known():
    """While this process stood still, a node came up and a deadline passed."""
    fleet = FakeFleet(2)
    driver, book = driver_of(fleet, placement_timeout=0.05)
    book.decided = lambda entry, _: time.sleep(0.1) if isinstance(entry.event, NodeJoined) else None
    assert driver.run().exit_code == 0
