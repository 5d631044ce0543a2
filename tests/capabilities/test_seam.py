"""What the kernel promises a capability: `raylaunch/cluster/capability.py`."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest

from raylaunch.cluster.capability import Capability, DriverPart
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import StopRequested
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.node.protocol.node_goal import CapabilitySection, LaunchWorkers, OpenStore, ProposeCheckpoint
from raylaunch.node.protocol.node_status import NodeStatus
from tests.fakes import FakeFleet, RunRecorder


class Part(DriverPart):
    """Notes what it is told, and shows each node of an attempt its number."""

    def __init__(self, notes, port) -> None:
        self.notes = notes
        self.port = port

    @contextlib.contextmanager
    def running(self):
        self.notes.append("begun")
        try:
            yield
        finally:
            self.notes.append("ended")

    def launched(self, now) -> None:
        for node in self.port.machine.roster:
            self.port.show(node, b"%d" % self.port.machine.attempt)

    def told(self, node, section) -> None:
        self.notes.append((node, section))


def driver(fleet: FakeFleet, *parts, **job) -> Driver:
    fleet.overrides.setdefault(CapabilitySection, lambda *_: None)
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    several = [Capability(name=f"part {number}", driver=part) for number, part in enumerate(parts)]
    return Driver(asked, "run", fleet, recorder, recorder, time.monotonic(), capabilities=several)


def test_what_is_shown_when_an_attempt_begins_comes_before_the_launch():
    sent, fleet = [], FakeFleet(2)

    def launch(node, order) -> None:
        sent.append((node, order.attempt))
        fleet.obey(node, order)

    def open_store(node, order) -> None:
        """Of the second attempt, too, before the first one fails: its launch waits for nothing."""
        fleet.obey(node, order)
        if order.attempt == 2:
            fleet.fail(0)

    fleet.overrides[LaunchWorkers] = launch
    fleet.overrides[CapabilitySection] = lambda node, order: sent.append((node, order.capability, order.body))
    fleet.on_launched[1] = lambda: None
    fleet.overrides[OpenStore] = open_store
    assert driver(fleet, partial(Part, []), max_restarts=1).run().exit_code == 0
    assert [each for each in sent if each[0] == "node-2"] == [
        ("node-2", "part 0", b"1"),
        ("node-2", 1),
        ("node-2", "part 0", b"2"),
        ("node-2", 2),
    ]


def test_what_is_shown_before_workers_save_comes_before_they_are_asked():
    sent, fleet = [], FakeFleet(2)

    class Saving(Part):
        def saving(self, now) -> None:
            self.port.show("node-2", b"saving")

    def propose(node, order) -> None:
        sent.append((node, "propose"))
        fleet.obey(node, order)

    fleet.overrides |= {
        CapabilitySection: lambda node, order: sent.append((node, order.body)),
        ProposeCheckpoint: propose,
    }
    saved = driver(fleet, partial(Saving, []), grace=60.0)
    fleet.on_launched[1] = lambda: saved.signalled("SIGTERM")
    saved.run()
    assert [what for node, what in sent if node == "node-2"] == [b"1", b"saving", "propose"]


@pytest.mark.parametrize("silent", [False, True])
def test_a_part_learns_of_a_node_that_is_lost_and_whether_it_is_dead(silent):
    notes, fleet = [], FakeFleet(2)

    class Losing(Part):
        def lost(self, node, *, is_dead) -> None:
            self.notes.append((node, is_dead))

    fleet.on_launched[1] = lambda: fleet.tell(AgentLost(node="node-2", why="gone", silent=silent))
    one = driver(fleet, partial(Losing, notes), nnodes="1:2")
    fleet.on_launched[2] = fleet.finish
    assert one.run().exit_code == 0
    assert notes == ["begun", ("node-2", not silent), "ended"]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_part_learns_before_the_next_attempt_that_a_node_is_released_and_whether_what_it_holds_stays(breaks):
    """It does if the workers had not saved: here one fails when they are asked to."""
    notes, fleet = [], FakeFleet(2)

    class Losing(Part):
        def launched(self, now) -> None:
            self.notes.append("launched")

        def lost(self, node, *, is_dead) -> None:
            self.notes.append((node, is_dead))

    def propose(node, order) -> None:
        fleet.obey(node, order)
        if breaks:
            fleet.fail(0)

    fleet.overrides[ProposeCheckpoint] = propose
    fleet.on_launched[1] = lambda: fleet.drain("node-2", 30.0)
    fleet.on_launched[2] = fleet.finish
    assert driver(fleet, partial(Losing, notes), nnodes="1:2", max_restarts=1).run().exit_code == 0
    assert notes == ["begun", "launched", ("node-2", breaks), "launched", "ended"]


def test_a_part_is_told_what_a_node_says_before_the_node_joins():
    """Else it would not know it when the first attempt begins."""

    class Knowing(Part):
        def launched(self, now) -> None:
            self.notes.append("launched")

    notes, fleet = [], FakeFleet(1)
    fleet.statuses["node-1"] = NodeStatus().after(CapabilitySection(capability="part 0", body=b"1"))
    assert driver(fleet, partial(Knowing, notes)).run().exit_code == 0
    assert notes == ["begun", ("node-1", b"1"), "launched", "ended"]


def test_a_part_is_told_what_has_changed_of_its_own():
    notes, others, fleet = [], [], FakeFleet(1)

    def tell() -> None:
        for name, body in (("part 0", b"1"), ("part 0", b"1"), ("nobody", b"2"), ("part 0", b"3")):
            fleet.report("node-1", CapabilitySection(capability=name, body=body))
        fleet.finish()

    fleet.on_launched[1] = tell
    assert driver(fleet, partial(Part, notes), partial(Part, others)).run().exit_code == 0
    assert notes == ["begun", ("node-1", b"1"), ("node-1", b"3"), "ended"]
    assert others == ["begun", "ended"]


def test_a_part_hears_of_workers_and_their_heartbeats():
    """It gets what is known of the attempt by then, and which workers are judged differently from now on."""

    class Listening(Part):
        def launched(self, now) -> None:
            self.notes.append(("launched", self.port.progress().attempt, [*self.port.progress().workers]))

        def started(self, word) -> None:
            self.notes.append(("started", word.node, word.attempt))

        def heartbeat(self, changed, now) -> None:
            self.notes.append(("heartbeat", [worker.rank for worker in changed], self.port.progress().workers[0].marks))

    notes, fleet = [], FakeFleet(1, nproc=2)

    def train() -> None:
        for marks in (1, 2):
            progress = WorkerProgress(rank=0, marks=marks, age=0.0)
            fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(progress,)))
        fleet.finish()

    fleet.on_launched[1] = train
    assert driver(fleet, partial(Listening, notes)).run().exit_code == 0
    assert notes == [
        "begun",
        ("launched", 1, [0, 1]),
        ("started", "node-1", 1),
        ("heartbeat", [0], 1),
        ("heartbeat", [], 2),
        "ended",
    ]


def test_a_part_asks_its_part_on_a_node():
    fleet = FakeFleet(1)
    fleet.ask = lambda capability, node: (capability, node)
    (part,) = driver(fleet, partial(Part, [])).parts.values()
    assert part.port.ask("node-1") == ("part 0", "node-1")


def test_a_part_ends_though_the_driver_does_not_end_well():
    class Failing(Part):
        def launched(self, now) -> None:
            raise ZeroDivisionError

    notes, others = [], []
    with pytest.raises(ZeroDivisionError):
        driver(FakeFleet(1), partial(Part, notes), partial(Failing, others)).run()
    assert notes == others == ["begun", "ended"]


def test_a_part_may_hold_an_event_back():
    """Here it is the end that a person asks for, which the part lets happen a moment later."""

    class Holding(DriverPart):
        def __init__(self, port) -> None:
            self.held = held

        @property
        def next_check(self) -> float:
            return 0.0 if self.held else float("inf")

        def holds(self, event, now) -> bool:
            if isinstance(event, StopRequested) and not self.held:
                self.held.append(event)
                return True
            return False

        def due_events(self, now):
            return (*self.held,)

    held, fleet = [], FakeFleet(1)
    stopped = driver(fleet, Holding)
    fleet.on_launched[1] = lambda: stopped.signalled("SIGTERM")
    assert stopped.run().exit_code == 128 + 15
    assert len(held) == 1


def test_other_threads_reach_a_part_through_the_loop():
    notes, fleet = [], FakeFleet(1)

    class Called(Part):
        @contextlib.contextmanager
        def running(self):
            self.port.call(lambda: self.notes.append(self.port.machine.attempt))
            yield

    assert driver(fleet, partial(Called, notes)).run().exit_code == 0
    assert len(notes) == 1
