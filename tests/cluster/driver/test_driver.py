"""The driver with a fake fleet: which orders it sends, in which order, and how it handles reports."""

from __future__ import annotations

import time

import pytest

from raylaunch.cluster.capability import Capability, DriverPart, DriverPort
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.fleet_api import FleetFailed, HostDraining
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import WorkersExited
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.record.journal import replay
from raylaunch.core.record.result import result
from raylaunch.errors import ClusterError
from raylaunch.node.logs.tail import LogOutput
from raylaunch.node.protocol.node_goal import OpenStore, ProposeCheckpoint, SignalWorkers, StopWorkers
from raylaunch.node.protocol.node_status import ManifestChanged, StoreOpened
from tests.fakes import READY, FakeFleet, RunRecorder


def run_driver(fleet: FakeFleet, *capabilities: Capability, **job):
    """Run to the end; return the driver, the last action, and what was recorded."""
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    driver = Driver(asked, "run", fleet, recorder, recorder, time.monotonic(), capabilities=capabilities)
    return driver, driver.run(), recorder


def orders(fleet: FakeFleet, *kinds: str):
    return [order for order in fleet.sent if order[0] in kinds]


def test_the_store_listens_before_a_launch():
    """Each node gets one launch order, and the next attempt's store is opened."""
    fleet = FakeFleet(2)
    _, finish, _ = run_driver(fleet)
    assert finish.exit_code == 0
    assert orders(fleet, "store", "launch") == [
        ("store", "node-1", 1),
        ("launch", "node-1", 1, 5001),
        ("launch", "node-2", 1, 5001),
        ("store", "node-1", 2),
    ]


def test_a_restart_is_one_order_for_each_node():
    """The store is open already, and a launch includes the stop of the attempt before."""
    fleet = FakeFleet(3)
    fleet.on_launched[1] = lambda: fleet.fail(4)
    _, finish, _ = run_driver(fleet, max_restarts=1)
    assert finish.exit_code == 0
    second = fleet.sent.index(("launch", "node-1", 2, 5002))
    assert fleet.sent[second : second + 3] == [("launch", f"node-{index}", 2, 5002) for index in (1, 2, 3)]
    assert orders(fleet, "stop") == []
    assert fleet.sent.count(("store", "node-1", 2)) == 1


def test_a_grace_that_is_too_short_to_save_is_said_once():
    """As soon as a save was measured, and not when the signal comes."""
    fleet = FakeFleet(1, nproc=1)

    def train() -> None:
        for marks in (1, 2):
            mark = WorkerProgress(rank=0, marks=marks, age=0.0, first_age=0.0, save_seconds=20.0 + marks)
            fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(mark,)))
        fleet.finish()

    fleet.on_launched[1] = train
    _, _, recorder = run_driver(fleet, grace=30.0)
    (said,) = [line for line in recorder.lines if "a save takes" in line]
    assert said.startswith(
        "a save takes longer than the 15.0 s that `grace: 30` leaves for it: raise `grace`, and how long"
    )


def test_a_lost_node_is_replaced():
    """The other nodes are stopped, and then launched together with the new one."""
    fleet = FakeFleet(2)

    def lose_and_come_back():
        fleet.lose("node-1")
        fleet.join("node-3")

    fleet.on_launched[1] = lose_and_come_back
    driver, finish, _ = run_driver(fleet)
    assert finish.exit_code == 0
    assert ("replace", "node-1") in fleet.sent
    assert ("stop", "node-2", 1, 0.0, "SIGTERM") in fleet.sent
    assert driver.machine.roster == ("node-2", "node-3")
    assert ("store", "node-2", 2) in fleet.sent  # the store of attempt 2 was on the lost node


def test_times_of_failures_are_converted_to_the_runs_clock():
    """A worker ended 900 seconds before its report by the node's clock, so 900 seconds before now by the run's."""
    fleet = FakeFleet(1)
    fleet.on_launched[1] = lambda: fleet.fail(0, at=1000.0, now=1900.0)
    _, _, recorder = run_driver(fleet, max_restarts=0)
    (exited,) = [entry.event for entry in recorder.entries if isinstance(entry.event, WorkersExited)]
    assert exited.failures[0].at == pytest.approx(exited.at - 900.0, abs=50)


def test_a_node_that_cannot_open_a_store_is_lost():
    """The reason is recorded."""
    fleet = FakeFleet(1)
    fleet.overrides[OpenStore] = lambda node, order: fleet.report(
        node, StoreOpened(attempt=order.attempt, port=0, why="no ports")
    )
    _, finish, recorder = run_driver(fleet, join_timeout=0.05)
    assert finish.exit_code == 3
    assert any("cannot open a store: no ports" in str(entry.event) for entry in recorder.entries)


def test_a_store_that_cannot_be_opened_before_it_is_needed_costs_nothing():
    """Whether it was never open or its process died: the node stays, and the store is ordered again when needed."""
    fleet = FakeFleet(1)
    asked: list[int] = []

    def open_store(node: str, order: OpenStore) -> None:
        asked.append(order.attempt)
        is_first = asked.count(order.attempt) == 1
        ports = {2: [0], 3: [5003, 0]}.get(order.attempt, []) if is_first else []
        for port in ports or [5000 + order.attempt]:
            fleet.report(node, StoreOpened(attempt=order.attempt, port=port, why="its process died"))
        if ports:
            fleet.fail(0)

    fleet.overrides[OpenStore] = open_store
    fleet.on_launched = {1: lambda: None, 2: lambda: None}  # their workers fail only when the next store has failed
    _, finish, _ = run_driver(fleet, max_restarts=2, join_timeout=500.0)
    assert finish.exit_code == 0
    assert asked == [1, 2, 2, 3, 3, 4]
    assert [order[-1] for order in orders(fleet, "launch")] == [5001, 5002, 5003]


def test_a_node_that_was_given_up_does_not_join():
    """Its report may have been sent before it was given up."""
    fleet = FakeFleet(2)
    fleet.given_up = {"node-1"}
    driver, finish, _ = run_driver(fleet, placement_timeout=0.05)
    assert finish.exit_code == 3
    assert set(driver.machine.nodes) == {"node-2"}


def test_nodes_without_torch_end_the_run():
    """At once, since waiting would not help."""
    fleet = FakeFleet(1)
    fleet.ready = READY.__class__(start_method="spawn", why=("cannot preload `torch`: gone",), torch=False, pid=1)
    with pytest.raises(ClusterError, match=r"no worker can be started on 10\.0\.0\.1"):
        run_driver(fleet)


def test_a_module_that_cannot_be_preloaded_is_reported_once():
    """Though all nodes report it, in each attempt."""
    fleet = FakeFleet(2)
    warning = "`a` is not preloaded: importing it starts 1 thread"
    fleet.on_launched[1] = lambda: (
        [fleet.report(node, ManifestChanged(manifest=None, why=warning)) for node in fleet.names],
        fleet.fail(1),
    )
    fleet.on_launched[2] = lambda: (fleet.report("node-1", ManifestChanged(manifest=None, why="")), fleet.finish())
    _, _, recorder = run_driver(fleet, max_restarts=1)
    assert recorder.lines == [warning]


@pytest.mark.parametrize("nodes", [1, 3])
def test_interfaces_that_workers_are_told_are_reported_once(nodes):
    """Though all nodes have them; and not at all if there is no other host that needs to reach them."""
    fleet = FakeFleet(nodes)
    fleet.interface_env = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    _, _, recorder = run_driver(fleet)
    words = "workers get GLOO_SOCKET_IFNAME=eth0, TP_SOCKET_IFNAME=eth0: other hosts cannot reach"
    assert [line.startswith(words) for line in recorder.lines] == [True] * (nodes > 1)


def test_two_stop_requests():
    """The first stops with a grace period, the second at once. Both may come from a signal handler."""
    fleet = FakeFleet(1)
    fleet.overrides[StopWorkers] = fleet.record  # workers that do not stop
    recorder = RunRecorder()
    driver = Driver(Job(entrypoint=Entrypoint(script="train.py")), "run", fleet, recorder, recorder, time.monotonic())
    fleet.on_launched[1] = lambda: (driver.signalled("SIGINT"), driver.signalled("SIGINT"))
    assert driver.run().exit_code == 130
    assert orders(fleet, "stop") == [("stop", "node-1", 1, 30.0, "SIGINT"), ("stop", "node-1", 1, 0.0, "SIGTERM")]


def test_signals_to_forward():
    """They go to every node, and the run continues."""
    fleet = FakeFleet(2)
    recorder = RunRecorder()
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, signals_to_forward=["SIGUSR1"])
    driver = Driver(job, "run", fleet, recorder, recorder, time.monotonic())
    fleet.overrides[SignalWorkers] = lambda node, order: (fleet.record(node, order), fleet.finish())
    fleet.on_launched[1] = lambda: driver.signalled("SIGUSR1")
    assert driver.run().exit_code == 0
    assert orders(fleet, "signal")[:2] == [("signal", "node-1", 1, "SIGUSR1"), ("signal", "node-2", 1, "SIGUSR1")]


def test_the_machines_timer():
    """Nothing arrives, so the `Tick` that the machine has set a timer for ends the run."""
    fleet = FakeFleet(1)
    fleet.start = lambda tell: None
    _, finish, _ = run_driver(fleet, placement_timeout=0.05)
    assert finish.exit_code == 3
    assert "0 of 1 nodes" in finish.why


def test_capabilities_learn_which_nodes_leave_also_of_one_that_is_drained_while_all_save():
    """And the workers are not asked to save a second time."""
    fleet = FakeFleet(3)
    told: list[set[str]] = []

    class Part(DriverPart):
        def __init__(self, port: DriverPort) -> None:
            self.machine = port.machine

        def saving(self, now: float) -> None:
            told.append(set(self.machine.leaving))

    def propose(node: str, order: ProposeCheckpoint) -> None:
        if node == "node-1":
            fleet.drain("node-2")
        fleet.obey(node, order)

    fleet.overrides[ProposeCheckpoint] = propose
    fleet.on_launched[1] = lambda: fleet.drain("node-3")
    _, finish, _ = run_driver(fleet, Capability(name="of a test", driver=Part), nnodes="1:3")
    assert finish.exit_code == 0
    assert told == [{"node-3"}, {"node-2", "node-3"}]
    assert len(orders(fleet, "propose")) == 3


def test_a_drain_of_the_drivers_own_host_is_reported():
    """The driver can do nothing else about it."""
    fleet = FakeFleet(1)
    notice = HostDraining(host="id-head", deadline=time.monotonic() + 30, why="", ours=True)
    fleet.on_launched[1] = lambda: (fleet.tell(notice), fleet.finish())
    _, finish, recorder = run_driver(fleet)
    assert finish.exit_code == 0
    assert recorder.lines == ["the host that this command runs on is being drained: with it the run ends"]


def test_a_fleet_that_failed_ends_the_run():
    """It gets no more nodes, so waiting would not help."""
    fleet = FakeFleet(1)
    fleet.on_launched[1] = lambda: fleet.tell(FleetFailed(error=ClusterError("no more nodes can be asked for")))
    with pytest.raises(ClusterError, match="no more nodes"):
        run_driver(fleet)


def test_output_and_warnings_reach_the_observer():
    """Output of workers, and warnings of fork servers, once for each node: one that was killed is started again."""
    fleet = FakeFleet(1)
    fleet.ready = READY.__class__(start_method="spawn", why=("3 threads are running",), torch=True, pid=1)

    def write():
        fleet.join("node-1")
        fleet.report("node-1", output=[LogOutput(rank=0, stream="stdout", data=b"hello\n")])
        fleet.finish()

    fleet.on_launched[1] = write
    _, _, recorder = run_driver(fleet)
    assert [part.data for part in recorder.output] == [b"hello\n"]
    assert recorder.lines == ["node-1: 3 threads are running"]


def test_the_journal_determines_actions_and_result():
    """Replaying it gives the same actions, and the result is computed from it alone."""
    fleet = FakeFleet(2)
    fleet.on_launched[1] = lambda: fleet.fail(3)
    fleet.on_launched[2] = lambda: fleet.fail(1)
    driver, _, recorder = run_driver(fleet, max_restarts=2, join_timeout=500.0)
    events = [entry.event for entry in recorder.entries if entry.event is not None]
    assert replay(driver.machine.job, events) == recorder.entries
    found = result(recorder.entries)
    assert found.ok
    assert [len(attempt.failures) for attempt in found.attempts] == [1, 1, 0]
