"""The driver with a fake fleet: progress, as computed from heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.executor import Executor
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    Cordon,
    Launch,
    Progressed,
    Release,
    RequestCheckpoint,
    Stop,
    Uncordon,
    WorkersExited,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.monitoring.checkpoint_step import may_ask
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.progress_report import ProgressReporter
from raylaunch.core.record.journal import replay
from raylaunch.node.protocol.node_goal import ProposeCheckpoint, StopWorkers
from tests.fakes import FakeFleet, RunRecorder


def driver_of(fleet: FakeFleet, **job):
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    return Driver(asked, "run", fleet, recorder, recorder, time.monotonic()), recorder


def events(recorder: RunRecorder, *kinds: type):
    return [entry.event for entry in recorder.entries if isinstance(entry.event, kinds)]


def heartbeat(marks: dict[int, int], *, attempt: int = 1, age: float = 0.0) -> Heartbeat:
    """Return a heartbeat; `marks`: how many steps each rank has done, the last of them `age` seconds ago."""
    return Heartbeat(
        attempt=attempt,
        marks=tuple(
            WorkerProgress(rank=rank, marks=count, age=age, first_age=age, step=count - 1, asked=count - 1)
            for rank, count in marks.items()
        ),
    )


def test_the_progress_of_an_attempt_is_reported():
    """For all nodes together; the last time right before the event that ends the attempt."""
    fleet = FakeFleet(2, nproc=1)

    def train():
        fleet.report("node-1", heartbeat=heartbeat({0: 1}))
        fleet.report("node-2", heartbeat=heartbeat({1: 2}))
        fleet.report("node-1", heartbeat=heartbeat({0: 9}))
        fleet.report("node-2", heartbeat=heartbeat({1: 8}))
        fleet.fail(0)

    fleet.on_launched[1] = train
    driver, recorder = driver_of(fleet, max_restarts=1)
    assert driver.run().exit_code == 0
    found = events(recorder, Progressed, WorkersExited)
    ended = next(index for index, event in enumerate(found) if isinstance(event, WorkersExited))
    last = found[ended - 1]
    assert isinstance(last, Progressed)
    assert (last.attempt, last.marks, last.high) == (1, 9, 8)


def test_progress_is_reported_more_often_in_the_first_minutes():
    """So that a short run has a course too, and a long one no more than a report in a minute."""
    monitor = ProgressMonitor()
    monitor.begin(1, 1)
    found = []
    for at in range(1, 1201):
        monitor.heartbeat(heartbeat({0: at}), float(at))
        found += [event.at for event in monitor.due_events(float(at))]
    assert found[:5] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert found[-1] - found[-2] == 60.0
    assert len(found) < 60


def test_the_first_steps_are_reported_at_once():
    """As soon as all workers have done one, also if no other event comes."""
    fleet = FakeFleet(1, nproc=2, heartbeat_seconds=0.05)
    fleet.on_launched[1] = lambda: fleet.report("node-1", heartbeat=heartbeat({0: 1, 1: 1}))
    driver, recorder = driver_of(fleet)
    recorder.on_entry = lambda entry, _: fleet.finish() if isinstance(entry.event, Progressed) else None
    assert driver.run().exit_code == 0
    assert [event.marks for event in events(recorder, Progressed)] == [1]


def test_a_person_is_shown_the_progress():
    """Not with every heartbeat, since there are as many as nodes, and nothing of it is recorded."""
    fleet = FakeFleet(2, nproc=1)

    def train():
        for marks in range(1, 50):
            fleet.report("node-1", heartbeat=heartbeat({0: marks}))
            fleet.report("node-2", heartbeat=heartbeat({1: marks}))
        fleet.finish()

    fleet.on_launched[1] = train
    driver, recorder = driver_of(fleet)
    shown = []
    recorder.on_progress = shown.append
    assert driver.run().exit_code == 0
    assert 1 <= len(shown) < 40
    assert len(events(recorder, Progressed)) <= 2


def test_progress_is_in_the_journal_where_the_machine_saw_it():
    """So that a replay decides the same."""
    fleet = FakeFleet(1)

    def train():
        fleet.report("node-1", heartbeat=heartbeat({0: 1, 1: 1}))
        fleet.report("node-1", heartbeat=heartbeat({0: 5, 1: 5}))
        fleet.fail(0)

    fleet.on_launched[1] = train
    driver, recorder = driver_of(fleet, max_restarts=1)
    driver.run()
    seen = [entry.event for entry in recorder.entries if entry.event is not None]
    assert replay(driver.machine.job, seen) == recorder.entries
    assert events(recorder, Progressed) != []


class SavingFleet(FakeFleet):
    """Workers of node-1 save when a checkpoint is requested. `grace`: what happens before they stop."""

    grace: Callable[[], None] = staticmethod(lambda: None)

    def obey(self, node, order):
        if isinstance(order, ProposeCheckpoint):
            self.report(node, self.workers(node, order.attempt, has_saved=True))
            return
        if isinstance(order, StopWorkers):
            self.grace()
        super().obey(node, order)


def run_with_drain(train: Callable[[FakeFleet], None], grace: Callable[[FakeFleet], None] = lambda _: None):
    """Run two nodes, of which the first is drained while they train; return what was recorded."""
    fleet = SavingFleet(2, nproc=1)
    fleet.grace = lambda: grace(fleet)
    fleet.on_launched[1] = lambda: (train(fleet), fleet.drain("node-1"))
    driver, recorder = driver_of(fleet, nnodes="1:2")
    assert driver.run().exit_code == 0
    return recorder


def test_steps_in_the_grace_period_count():
    """If the script does not end at SIGTERM, these steps are lost too."""
    recorder = run_with_drain(
        lambda fleet: fleet.report("node-1", heartbeat=heartbeat({0: 3, 1: 3})),
        lambda fleet: fleet.report("node-1", heartbeat=heartbeat({0: 90, 1: 90})),
    )
    assert [event.marks for event in events(recorder, Progressed) if event.attempt == 1][-1] == 90


def test_ranks_that_did_not_save_are_named():
    """If only some ranks call `should_checkpoint`. If none ever does, nothing is reported."""
    asked = WorkerProgress(rank=0, marks=3, age=0.0, step=2, asked=2)
    recorder = run_with_drain(lambda fleet: fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(asked,))))
    assert [line for line in recorder.lines if "rank 1 never asked `should_checkpoint`" in line] != []
    never_polled = WorkerProgress(rank=0, marks=3, age=0.0, step=2)
    recorder = run_with_drain(
        lambda fleet: fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(never_polled,)))
    )
    assert [line for line in recorder.lines if "never asked" in line] == []


def test_all_workers_are_examined_once_at_the_end_of_a_run(monkeypatch):
    """Not for each node that finishes: with a thousand nodes this would take the driver too long."""
    fleet = FakeFleet(5, nproc=1)

    def train():
        for rank, node in enumerate(fleet.names):
            fleet.report(node, heartbeat=heartbeat({rank: 9}))
        fleet.finish()

    fleet.on_launched[1] = train
    driver, _ = driver_of(fleet)
    checked: list[float] = []
    report = ProgressReporter.report
    monkeypatch.setattr(ProgressReporter, "report", lambda self, at: (checked.append(at), report(self, at))[1])
    assert driver.run().exit_code == 0
    assert len(checked) == 1


@given(earlier=st.lists(st.booleans(), max_size=4), marks=st.integers(0, 2**62), optimizers=st.integers(1, 4))
def test_a_worker_that_has_not_asked_yet_is_waited_for_if_the_script_asks(earlier, marks, optimizers):
    """Whatever the attempts before were like: if all workers of one of them asked, until it has made many steps."""
    monitor = ProgressMonitor()
    for attempt, asks in enumerate(earlier, start=1):
        monitor.begin(attempt, 2)
        assert monitor.calls_should_checkpoint == any(earlier[: attempt - 1])
        workers = (
            WorkerProgress(rank=0, marks=9, age=0.0, asked=8),
            WorkerProgress(rank=1, marks=9, age=0.0, asked=8 if asks else None),
        )
        monitor.heartbeat(Heartbeat(attempt=attempt, marks=workers), 1.0)
    monitor.begin(len(earlier) + 1, 2)
    expected = monitor.calls_should_checkpoint
    assert expected == any(earlier)
    assert may_ask(optimizers, expected=expected) == expected
    assert may_ask(marks, expected=expected) <= expected
    assert not may_ask(10 + marks, expected=expected)


@pytest.fixture
def silent_executor(monkeypatch):
    """An executor whose nodes never answer."""
    fleet = FakeFleet(2)
    given_up: list[tuple[str, bool]] = []
    monitor = ProgressMonitor()
    nodes = NodeRegistry(5.0, None)
    monkeypatch.setattr(nodes, "give_up", lambda node, *, ends: given_up.append((node, ends)))
    orders = Executor(Machine(Job()), "run", fleet, monitor, nodes)
    return orders, fleet, monitor, given_up


def test_a_checkpoint_is_proposed_at_a_step_ahead_of_all_workers(silent_executor):
    orders, fleet, monitor, _ = silent_executor
    monitor.begin(1, 2)
    monitor.heartbeat(heartbeat({0: 10, 1: 14}), 100.0)
    orders.perform([RequestCheckpoint(attempt=1, nodes=("node-1", "node-2"), why="")], 100.0)
    (first, second) = [order for order in fleet.sent if order[0] == "propose"]
    assert first[3] == second[3] > 14
    assert (first[1], second[1]) == ("node-1", "node-2")


def test_a_released_node_is_given_up(silent_executor):
    orders, fleet, _, given_up = silent_executor
    orders.perform([Release(node="node-1", why=""), Cordon(host="h", why=""), Uncordon(host="h", why="")], 0.0)
    assert given_up == [("node-1", True)]
    assert fleet.sent == [("release", "node-1"), ("cordon", "h"), ("uncordon", "h")]


def test_the_agent_of_a_node_that_frees_its_memory_is_not_ended_by_its_link(silent_executor):
    """The fleet kills it afterwards."""
    orders, _, _, given_up = silent_executor
    orders.perform([Release(node="node-1", why="", frees_memory=True)], 0.0)
    assert given_up == [("node-1", False)]


def test_a_stop_with_grace_is_sent_to_all(silent_executor):
    """A stop without grace is part of the launch that follows it."""
    orders, fleet, _, _ = silent_executor
    launch = Launch(attempt=2, roster=("node-1",), why="")
    orders.perform([Stop(attempt=1, nodes=("node-1", "node-2"), grace=0.0, why=""), launch], 0.0)
    assert [order[1] for order in fleet.sent if order[0] == "stop"] == ["node-2"]
    orders.perform([Stop(attempt=1, nodes=("node-1",), grace=3.0, why=""), launch], 0.0)
    assert [order[1] for order in fleet.sent if order[0] == "stop"] == ["node-2", "node-1"]
