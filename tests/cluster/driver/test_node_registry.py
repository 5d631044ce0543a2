"""The node registry and the driver: which nodes count as alive, and how reports of lost ones are handled."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.fleet_api import AgentLost, FleetFailed, HostDraining, ReportReceived, SlotGranted
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import NodeDraining, NodeGranted, NodeJoined, NodeLost, WorkersExited
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.errors import ClusterError
from tests.fakes import FakeFleet, RunRecorder, worker_exit


class FakeLinks:
    """The links of these nodes are up until a test removes them."""

    def __init__(self, *nodes: str) -> None:
        self.up = set(nodes)
        self.closed: list[str] = []
        self.tell = lambda _: None

    def start(self, tell) -> None:
        self.tell = tell

    def is_up(self, node: str) -> bool:
        return node in self.up

    def shut_down(self, node: str) -> None:
        self.closed.append(node)


def driver_of(fleet: FakeFleet, *, links: FakeLinks | None = None, **job):
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    return Driver(asked, "run", fleet, recorder, recorder, time.monotonic(), links), recorder


def events(recorder: RunRecorder, kind: type):
    return [entry.event for entry in recorder.entries if isinstance(entry.event, kind)]


def send_report(fleet: FakeFleet, node: str) -> None:
    fleet.tell(ReportReceived(node=node, report=AgentReport(sent_at=0.0), at=time.monotonic()))


def replaced_by(fleet: FakeFleet, node: str):
    """Let another agent come up for each one that is replaced; return the list of replaced ones."""
    seen: list[AgentLost] = []

    def replace(gone: AgentLost) -> None:
        seen.append(gone)
        fleet.lose(gone.node)
        fleet.join(node)

    fleet.replace = replace
    return seen


def failed(attempt: int) -> WorkersStatus:
    return WorkersStatus(attempt=attempt, failures=(worker_exit(attempt, 0, exit_code=1),))


# The registry alone.


def silent(registry: NodeRegistry, now: float) -> list[str]:
    return [gone.node for gone in registry.silent(now)]


def test_a_node_that_was_up_before_a_takeover_must_be_heard_of_from_its_first_report_on():
    """Until then it has longer."""
    registry = NodeRegistry(5.0, None)
    for node in ("node-1", "node-2"):
        registry.came_up(node, "a", 100.0)
        registry.heard(node, 160.0)
    assert silent(registry, registry.next_check) == []
    registry.heard("node-1", 106.0)
    while (now := registry.next_check) < 111.0:
        assert silent(registry, now) == []
    assert silent(registry, now) == ["node-1"]
    registry.give_up("node-1")
    for now in range(112, 165):
        assert silent(registry, float(now)) == []
    assert silent(registry, 165.0) == ["node-2"]


def test_a_node_without_reports_for_node_timeout_is_silent():
    registry = NodeRegistry(5.0, None)
    registry.came_up("node-1", "a", 100.0)
    registry.came_up("node-2", "b", 101.0)
    assert registry.next_check == 105.0
    assert silent(registry, 104.9) == []
    (gone,) = registry.silent(105.0)
    assert (gone.node, gone.silent, gone.why) == ("node-1", True, "nothing was heard of it for 5 s")
    registry.give_up("node-1")
    assert silent(registry, 105.1) == []
    assert registry.next_check == 106.0


def test_a_report_moves_the_deadline():
    registry = NodeRegistry(5.0, None)
    registry.came_up("node-1", "a", 100.0)
    registry.heard("node-1", 103.0)
    assert silent(registry, 105.0) == []
    assert registry.next_check == 108.0
    assert silent(registry, 108.0) == ["node-1"]
    assert registry.last_heard("node-1") == 103.0


def test_after_a_pause_of_the_driver_nodes_get_time_for_a_report():
    """While it was stopped it could read none. A node that sends none within a report interval is lost."""
    registry = NodeRegistry(5.0, None)
    registry.came_up("node-1", "a", 100.0)
    registry.came_up("node-2", "b", 100.0)
    assert silent(registry, 200.0) == []
    registry.heard("node-1", 200.1)
    assert registry.next_check == 201.0
    assert silent(registry, 201.0) == ["node-2"]


def test_reports_before_a_node_is_known_to_be_up_count():
    """The report that it is up may have waited in the inbox while later ones arrived."""
    registry = NodeRegistry(5.0, None)
    registry.heard("node-1", 100.0)
    registry.heard("node-1", 104.0)
    registry.came_up("node-1", "a", 100.0)
    assert registry.next_check == 109.0


def test_an_unknown_node():
    registry = NodeRegistry(5.0, None)
    assert registry.last_heard("node-1") == float("-inf")
    assert not registry.is_lost("node-1")
    assert registry.link_down("node-1").why == "its agent died"


def test_the_nodes_that_are_up_on_a_host():
    registry = NodeRegistry(5.0, None)
    for node, host in (("node-1", "a"), ("node-2", "b"), ("node-3", "a")):
        registry.came_up(node, host, 100.0)
    assert registry.on_host("a") == ["node-1", "node-3"]
    registry.give_up("node-1")
    assert registry.on_host("a") == ["node-3"]


def test_a_report_of_ray_must_be_proved_if_the_link_is_up():
    """The raylet may have died, or a connection, but not the agent.

    The agent is told to exit, and its end is awaited.
    """
    links = FakeLinks("node-1")
    registry = NodeRegistry(5.0, links)
    registry.came_up("node-1", "a", 100.0)
    assert registry.must_be_proved(AgentLost(node="node-1", why="its raylet died"))
    assert links.closed == ["node-1"]
    assert registry.link_down("node-1").why == "its raylet died"


def test_a_node_that_ray_reported_is_lost_when_it_is_silent():
    registry = NodeRegistry(5.0, FakeLinks("node-1"))
    registry.came_up("node-1", "a", 100.0)
    registry.must_be_proved(AgentLost(node="node-1", why="its raylet died"))
    assert silent(registry, 105.0) == ["node-1"]


def test_a_report_of_ray_counts_at_once_if_there_is_no_link():
    gone = AgentLost(node="node-1", why="its agent died")
    for links in (FakeLinks(), None):
        registry = NodeRegistry(5.0, links)
        registry.came_up("node-1", "a", 100.0)
        assert not registry.must_be_proved(gone)


def test_an_agent_that_was_never_up_has_no_workers_to_wait_for():
    assert not NodeRegistry(5.0, FakeLinks("node-1")).must_be_proved(AgentLost(node="node-1", why="its agent died"))


def test_memory_does_not_grow_with_lost_nodes():
    """Of a node that was lost long ago nothing can arrive any more."""
    registry, sizes = NodeRegistry(5.0, None), {}
    for number in range(25_000):
        registry.came_up(f"node-{number}", "a", 100.0)
        registry.give_up(f"node-{number}")
        registry.heard(f"node-{number}", 101.0)
        if number in (20_500, 24_999):
            sizes[number] = len(pickle.dumps({name: kept for name, kept in vars(registry).items() if name != "_lock"}))
    assert sizes[24_999] == sizes[20_500]
    assert registry.is_lost("node-20000")


def test_a_node_that_was_given_up_stays_lost():
    """Later reports of it are ignored."""
    links = FakeLinks("node-1")
    registry = NodeRegistry(5.0, links)
    registry.came_up("node-1", "a", 100.0)
    registry.give_up("node-1")
    registry.heard("node-1", 101.0)
    assert registry.is_lost("node-1")
    assert links.closed == ["node-1"]
    assert silent(registry, 1000.0) == []
    assert silent(registry, 1002.0) == []


class SlowToLook(dict):
    """Before somebody learns what is in it, `meanwhile` runs in another thread, and gets the time to end."""

    def __init__(self, meanwhile) -> None:
        self.other = threading.Thread(target=meanwhile)

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.2)
        return there


def test_a_node_that_is_given_up_while_a_report_of_it_arrives():
    """Reports arrive in another thread. Nothing of the node is left."""
    registry = NodeRegistry(5.0, None)
    registry._lost = lost = SlowToLook(lambda: registry.give_up("node-1"))  # noqa: SLF001
    registry.heard("node-1", 101.0)
    lost.other.join()
    assert registry.is_lost("node-1")
    assert registry.last_heard("node-1") == float("-inf")


def test_a_node_that_was_given_up_may_end_otherwise_than_by_its_link():
    """It is lost all the same."""
    links = FakeLinks("node-1")
    registry = NodeRegistry(5.0, links)
    registry.came_up("node-1", "a", 100.0)
    registry.give_up("node-1", ends=False)
    assert registry.is_lost("node-1")
    assert links.closed == []


# The driver with a fake fleet.


def test_a_silent_node_is_lost():
    """It is replaced, and no restart is used up."""
    fleet = FakeFleet(1)
    fleet.on_launched[1] = lambda: None
    seen = replaced_by(fleet, "node-2")
    driver, recorder = driver_of(fleet, node_timeout=1.0)
    assert driver.run().exit_code == 0
    (lost,) = events(recorder, NodeLost)
    assert (lost.node, lost.why) == ("node-1", "nothing was heard of it for 1 s")
    (gone,) = seen
    assert gone.silent
    assert (driver.machine.attempt, driver.machine.restarts) == (2, 0)


def test_a_node_that_reports_is_not_lost():
    """Even if the driver waits for the terminal longer than `node_timeout`."""
    fleet = FakeFleet(1)
    driver, recorder = driver_of(fleet, node_timeout=3.0)

    def write_slowly(_):
        for _ in range(20):
            time.sleep(0.2)
            send_report(fleet, "node-1")
        fleet.finish()

    recorder.on_output = write_slowly
    fleet.on_launched[1] = lambda: fleet.report("node-1", output=["anything"])
    assert driver.run().exit_code == 0
    assert events(recorder, NodeLost) == []


def test_reports_of_a_lost_node_are_ignored():
    """Whether they say that its workers failed, that it came up, or that it is lost."""
    fleet = FakeFleet(1)
    fleet.on_launched[1] = lambda: fleet.lose("node-1")

    def late(gone: AgentLost) -> None:
        fleet.report("node-1", failed(1))
        fleet.join("node-1")
        fleet.tell(SlotGranted(node="node-1", host="h", address="10.0.0.1"))
        fleet.lose("node-1")
        fleet.join("node-2")

    fleet.replace = late
    driver, recorder = driver_of(fleet)
    assert driver.run().exit_code == 0
    assert [event.node for event in events(recorder, NodeJoined)] == ["node-1", "node-2"]
    assert len(events(recorder, NodeLost)) == 1
    assert events(recorder, NodeGranted) == []
    assert [event.node for event in events(recorder, WorkersExited)] == ["node-2"]


def test_a_node_that_ray_reports_dead_is_ended_first():
    """It may still train, so the next attempt begins only when its process is gone."""
    fleet = FakeFleet(1)
    links = FakeLinks("node-1")
    order: list[str] = []

    def shut_down(node: str) -> None:
        order.append(f"shut down {node}")
        if len(order) == 1:
            links.tell(LinkDown(node=node))

    links.shut_down = shut_down
    fleet.on_launched[1] = lambda: fleet.lose("node-1")
    fleet.replace = lambda gone: (order.append(f"replace {gone.node}"), fleet.join("node-2"))
    driver, recorder = driver_of(fleet, links=links)
    assert driver.run().exit_code == 0
    assert order == ["shut down node-1", "shut down node-1", "replace node-1"]
    assert [event.why for event in events(recorder, NodeLost)] == ["its agent died"]


def test_a_node_whose_link_is_down_is_lost():
    """Ray's report, seconds later, changes nothing."""
    fleet = FakeFleet(1)
    links = FakeLinks()
    fleet.on_launched[1] = lambda: links.tell(LinkDown(node="node-1"))
    fleet.replace = lambda gone: (fleet.lose("node-1"), fleet.join("node-2"))
    driver, recorder = driver_of(fleet, links=links)
    assert driver.run().exit_code == 0
    assert [event.node for event in events(recorder, NodeLost)] == ["node-1"]


def test_a_fleet_that_fails_ends_the_run_at_once():
    """Also while workers run."""
    fleet = FakeFleet(1)
    fleet.on_launched[1] = lambda: fleet.tell(FleetFailed(error=ClusterError("the head is gone")))
    driver, _ = driver_of(fleet)
    with pytest.raises(ClusterError, match="the head is gone"):
        driver.run()


def test_a_granted_slot_is_recorded():
    fleet = FakeFleet(1)
    start = fleet.start

    def grant_and_start(tell):
        tell(SlotGranted(node="node-1", host="id-node-1", address="10.0.0.1"))
        start(tell)

    fleet.start = grant_and_start
    driver, recorder = driver_of(fleet)
    driver.run()
    (granted,) = events(recorder, NodeGranted)
    assert (granted.node, granted.address) == ("node-1", "10.0.0.1")
    (joined,) = events(recorder, NodeJoined)
    assert joined.host == "id-node-1"


def test_a_drain_concerns_every_node_on_the_host():
    """Also those that come up there later. Its deadline is converted to seconds since the run began."""
    fleet = FakeFleet(2)

    def start_with_a_notice(tell):
        fleet.tell = tell
        fleet.join("node-1")
        tell(HostDraining(host="id-node-1", deadline=time.monotonic() + 100.0, why="preemption"))
        tell(HostDraining(host="id-node-2", deadline=time.monotonic() + 200.0, why="maintenance"))
        fleet.join("node-2")

    fleet.start = start_with_a_notice
    driver, recorder = driver_of(fleet, placement_timeout=0.1)
    assert driver.run().exit_code == 3
    drained = events(recorder, NodeDraining)
    assert [(event.node, event.why) for event in drained] == [("node-1", "preemption"), ("node-2", "maintenance")]
    assert [event.deadline for event in drained] == [pytest.approx(100.0, abs=50), pytest.approx(200.0, abs=50)]


def test_what_arrived_in_time_is_handled_before_a_deadline():
    """While the driver was paused, a node came up and a deadline passed."""
    fleet = FakeFleet(2)
    driver, recorder = driver_of(fleet, placement_timeout=0.05)
    recorder.on_entry = lambda entry, _: time.sleep(0.1) if isinstance(entry.event, NodeJoined) else None
    assert driver.run().exit_code == 0
