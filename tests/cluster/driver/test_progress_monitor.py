"""The driver with a fake fleet: progress and hangs, as computed from heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.executor import Executor
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.core.failures.stacks import Stack
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
    WorkersHung,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.monitoring.hang_detector import AUTO_FLOOR
from raylaunch.core.monitoring.hang_policy import LOOKS
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.progress import ProgressTracker
from raylaunch.core.monitoring.progress_report import ProgressReporter
from raylaunch.core.monitoring.rank_progress import WARM_UP
from raylaunch.core.placement.environment import Member, assign
from raylaunch.core.record.journal import replay
from raylaunch.node.protocol.messages import DumpStacks, ProposeCheckpoint, StacksDumped, StopWorkers
from tests.fakes import FakeFleet, RunRecorder

FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'
REDUCE = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
)


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
    monitor = ProgressMonitor(ProgressTracker(None, auto=True), FakeFleet(1, nproc=1), lambda *_: None)
    monitor.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    found = []
    for at in range(1, 1201):
        monitor.heartbeat(heartbeat({0: at}), float(at))
        found += [event.at for event in monitor.due_events(float(at)) if isinstance(event, Progressed)]
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


def run_with_hang(fleet: FakeFleet, **job):
    """Run two nodes with one worker each, which make steps and then none."""

    def train():
        for count in range(1, WARM_UP + 2):
            fleet.report("node-1", heartbeat=heartbeat({0: count}))
            fleet.report("node-2", heartbeat=heartbeat({1: count}))
        fleet.report("node-1", heartbeat=heartbeat({0: WARM_UP + 1}, age=5.0))
        fleet.report("node-2", heartbeat=heartbeat({1: WARM_UP + 1}, age=5.0))

    fleet.on_launched[1] = train
    driver, recorder = driver_of(fleet, hang_timeout=2.0, max_restarts=1, **job)
    return driver, driver.run(), recorder


def test_a_hang_is_probed_before_the_attempt_is_stopped():
    """All nodes dump stacks. The worker that differs is at fault, and all stacks are kept for a person."""
    fleet = FakeFleet(2, nproc=1)
    fleet.stacks = {
        "node-1": (Stack(rank=0, state="S", text=REDUCE),),
        "node-2": (Stack(rank=1, state="S", text=FETCH),),
    }
    driver, finish, recorder = run_with_hang(fleet)
    assert finish.exit_code == 0
    (hung,) = events(recorder, WorkersHung)
    assert [failure.rank for failure in hung.failures] == [1]
    assert [group.ranks for group in hung.groups] == [(1,), (0,)]
    assert [order for order in fleet.sent if order[0] == "stacks"] == [("stacks", "node-1", 1), ("stacks", "node-2", 1)]
    assert "train.py:33 in fetch" in recorder.stacks[1]
    assert "what all workers were doing is in attempt-1/stacks.txt" in recorder.lines
    assert (driver.machine.attempt, driver.machine.restarts) == (2, 1)


def test_a_node_that_cannot_answer_is_not_waited_for():
    fleet = FakeFleet(2, nproc=1)
    fleet.stacks = {"node-1": (Stack(rank=0, state="S", text=REDUCE),)}
    fleet.overrides[DumpStacks] = lambda node, order: fleet.obey(node, order) if node == "node-1" else None
    _, finish, recorder = run_with_hang(fleet)
    assert finish.exit_code == 0
    (hung,) = events(recorder, WorkersHung)
    assert {rank for group in hung.groups for rank in group.ranks} == {0, 1}


def test_answers_of_an_attempt_that_has_ended_meanwhile_are_dropped():
    """A worker died before its node could answer, and that ended the attempt."""
    fleet = FakeFleet(2, nproc=1)
    fleet.overrides[DumpStacks] = lambda node, _: fleet.fail(0) if node == "node-1" else None
    driver, finish, recorder = run_with_hang(fleet)
    assert finish.exit_code == 0
    assert events(recorder, WorkersHung) == []
    assert driver.machine.restarts == 1


def test_no_hang_is_found_with_hang_timeout_off():
    fleet = FakeFleet(1, nproc=1)

    def train():
        for count in range(1, WARM_UP + 2):
            fleet.report("node-1", heartbeat=heartbeat({0: count}))
        fleet.report("node-1", heartbeat=heartbeat({0: WARM_UP + 1}, age=1e6))
        fleet.finish()

    fleet.on_launched[1] = train
    driver, _ = driver_of(fleet, hang_timeout="off")
    assert driver.run().exit_code == 0
    assert [order for order in fleet.sent if order[0] == "stacks"] == []


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


def test_workers_are_not_examined_while_none_can_hang():
    """Except for the first steps. The heartbeats of a thousand nodes each second are only stored."""
    fleet = FakeFleet(1, nproc=1)
    progress = ProgressTracker(None, auto=True)
    monitor = ProgressMonitor(progress, fleet, lambda *_: None)
    monitor.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    checked: list[float] = []
    check = progress.hangs.check
    progress.hangs.check = lambda now: (checked.append(now), check(now))[1]
    for at in range(1, 200):
        monitor.heartbeat(heartbeat({0: at}), float(at))
        list(monitor.due_events(float(at)))
    assert len(checked) < 5


@pytest.fixture
def silent_executor(monkeypatch):
    """An executor whose nodes never answer."""
    fleet = FakeFleet(2)
    progress = ProgressTracker(None, auto=True)
    given_up: list[tuple[str, bool]] = []
    monitor = ProgressMonitor(progress, fleet, lambda *_: None)
    nodes = NodeRegistry(5.0, None)
    monkeypatch.setattr(nodes, "give_up", lambda node, *, ends: given_up.append((node, ends)))
    orders = Executor(Machine(Job()), "run", fleet, monitor, nodes)
    return orders, fleet, progress, given_up


def test_a_checkpoint_is_proposed_at_a_step_ahead_of_all_workers(silent_executor):
    orders, fleet, progress, _ = silent_executor
    progress.begin(1, range(2))
    progress.update(heartbeat({0: 10, 1: 14}), 100.0)
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


def test_a_hang_is_reported_once():
    """Though it lasts until another attempt begins."""
    fleet = FakeFleet(1, nproc=1)
    monitor = ProgressMonitor(ProgressTracker(2.0, auto=False), fleet, lambda *_: None)
    monitor.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    found = []
    for at in range(1, 60):
        monitor.heartbeat(heartbeat({0: min(at, WARM_UP + 1)}, age=max(0.0, at - WARM_UP - 1)), float(at))
        found.extend(monitor.due_events(float(at)))
        found.extend(monitor.due_events(at + 0.5))
    assert [type(event) for event in found].count(WorkersHung) == 1
    assert [order for order in fleet.sent if order[0] == "stacks"] == [("stacks", "node-1", 1)]


# With `hang_timeout: auto`.


class HangingFleet:
    """Two nodes with one worker each that have made steps and make no more, sampled once a second."""

    def __init__(self, *stacks: Callable[[int], Stack]) -> None:
        """`stacks`: each rank's stack in its n-th sample."""
        self.fleet = FakeFleet(2, nproc=1)
        self.messages: list[str] = []
        self.sample_counts = [0, 0]
        self.stacks = stacks
        self.fleet.overrides[DumpStacks] = self.answer
        self.monitor = ProgressMonitor(
            ProgressTracker(None, auto=True), self.fleet, lambda *_: None, self.messages.append
        )
        self.begin(1)

    def begin(self, attempt: int) -> None:
        self.attempt, self.now = attempt, 0.0
        members = [Member(node=name, address="10.0.0.1", nproc=1) for name in self.fleet.names]
        self.monitor.begin(assign(attempt, members))
        for marks in range(1, WARM_UP + 1):
            self.send_heartbeat(marks)

    def answer(self, node: str, order: DumpStacks) -> None:
        rank = self.fleet.names.index(node)
        self.sample_counts[rank] += 1
        stack = self.stacks[rank](self.sample_counts[rank])
        self.monitor.stacks(StacksDumped(node=node, attempt=order.attempt, stacks=(stack,)))

    def send_heartbeat(self, marks: int, age: float = 0.0) -> None:
        self.now += 0.5
        self.monitor.heartbeat(heartbeat({0: marks, 1: marks}, attempt=self.attempt, age=age), self.now)

    def run_silent(self, silence: float) -> list[float]:
        """Let the workers make no steps for so long; return after how many seconds each hang was reported."""
        found = []
        last = self.now
        while self.now - last < silence:
            self.send_heartbeat(WARM_UP, self.now + 0.5 - last)
            found += [self.now - last for event in self.monitor.due_events(self.now) if isinstance(event, WorkersHung)]
        return found


def at_line(rank: int, text: str) -> Callable[[int], Stack]:
    return lambda _: Stack(rank=rank, state="S", text=text)


def moves(rank: int) -> Callable[[int], Stack]:
    return lambda look: Stack(rank=rank, state="S", text=FETCH.replace("33", str(look)))


def test_with_auto_a_computing_worker_does_not_hang():
    """It is sampled again, at growing intervals, and the user is told."""
    fleet = HangingFleet(moves(0), at_line(1, REDUCE))
    assert fleet.run_silent(3000) == []
    assert fleet.sample_counts == [4 * LOOKS, 4 * LOOKS]  # after 5, 10, 20 and 40 minutes
    assert all(
        f"rank 0 works, at train.py:{at * LOOKS} in fetch" in message for at, message in enumerate(fleet.messages, 1)
    )
    assert len(fleet.messages) == 4
    (hung_at,) = fleet.run_silent(10**4)
    assert hung_at > 4000


def test_with_auto_workers_that_all_wait_are_a_hang():
    """It is reported as soon as all samples show it."""
    (hung_at,) = HangingFleet(at_line(0, REDUCE), at_line(1, REDUCE)).run_silent(900)
    assert AUTO_FLOOR < hung_at < AUTO_FLOOR + 2 * LOOKS


def test_with_auto_a_step_ends_the_probe():
    """No hang is reported."""
    fleet = HangingFleet(at_line(0, REDUCE), at_line(1, REDUCE))
    fleet.run_silent(AUTO_FLOOR + 3)
    assert fleet.sample_counts[0] > 1
    found = []
    for more in range(1, 4 * LOOKS):
        fleet.send_heartbeat(WARM_UP + more)
        found += fleet.monitor.due_events(fleet.now)
    assert [event for event in found if isinstance(event, WorkersHung)] == []
    assert (fleet.messages, fleet.sample_counts[0] < LOOKS) == ([], True)


def test_a_hang_at_the_same_place_is_reported_later_each_time():
    """A healthy pause there, in which no worker seems to compute, would otherwise end every attempt."""
    fleet = HangingFleet(at_line(0, FETCH), at_line(1, REDUCE))
    found = []
    for attempt in (1, 2, 3):
        fleet.begin(attempt)
        found += fleet.run_silent(3000)
    assert [round(hung_at / AUTO_FLOOR) for hung_at in found] == [2, 4, 8]


# A start that takes long.


def test_who_has_not_joined_is_said_once():
    """60 s after all workers were started, and again later until there is something to say."""
    fleet = FakeFleet(2, nproc=1)
    looks = {"node-1": [FETCH, REDUCE, REDUCE], "node-2": [FETCH, FETCH, FETCH]}
    taken: list[float] = []
    said: list[tuple[float, str]] = []
    now = 0.0

    def answer(node: str, order: DumpStacks) -> None:
        taken.append(now)
        rank = fleet.names.index(node)
        stack = Stack(rank=rank, state="S", text=looks[node].pop(0))
        monitor.stacks(StacksDumped(node=node, attempt=order.attempt, stacks=(stack,)))

    fleet.overrides[DumpStacks] = answer
    monitor = ProgressMonitor(
        ProgressTracker(None, auto=True), fleet, lambda *_: None, lambda text: said.append((now, text))
    )
    monitor.begin(assign(1, [Member(node=name, address="10.0.0.1", nproc=1) for name in fleet.names]))
    for at in range(1, 500):
        now = float(at)
        if at in (10, 20):
            monitor.started(WorkersStarted(at=now, attempt=1, node=fleet.names[at // 10 - 1]))
        monitor.heartbeat(heartbeat({0: 0, 1: 0}), now)
        assert list(monitor.due_events(now)) == []
    assert taken == [80.0, 80.0, 140.0, 140.0]
    assert said == [
        (141.0, "1 of 2 ranks has not joined the others after 121 s: rank 1 on node-2, at train.py:33 in fetch")
    ]


@pytest.mark.parametrize(("timeout", "marks"), [(None, 0), (1000.0, 1)])
def test_nobody_is_examined_at_the_start_without_need(timeout, marks):
    """With `hang_timeout: off`, or if all workers have completed a step."""
    fleet = FakeFleet(1, nproc=1)
    monitor = ProgressMonitor(ProgressTracker(timeout, auto=False), fleet, lambda *_: None)
    monitor.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    monitor.started(WorkersStarted(at=1.0, attempt=1, node="node-1"))
    for at in range(1, 200):
        monitor.heartbeat(heartbeat({0: marks}, age=float(at)), float(at))
        list(monitor.due_events(float(at)))
    assert [order for order in fleet.sent if order[0] == "stacks"] == []


def test_a_number_is_obeyed_before_the_first_step():
    """It counts from the time at which the last node has started its workers; the rank that is not in a collective is
    the cause.
    """
    fleet = FakeFleet(2, nproc=1)
    fleet.stacks = {
        "node-1": (Stack(rank=0, state="S", text=REDUCE),),
        "node-2": (Stack(rank=1, state="S", text=FETCH),),
    }
    monitor = ProgressMonitor(ProgressTracker(8.0, auto=False), fleet, lambda *_: None)
    monitor.begin(assign(1, [Member(node=name, address="10.0.0.1", nproc=1) for name in fleet.names]))
    fleet.overrides[DumpStacks] = lambda node, order: monitor.stacks(
        StacksDumped(node=node, attempt=order.attempt, stacks=fleet.stacks[node])
    )
    found = []
    monitor.heartbeat(heartbeat({0: 0}), 1.0)
    monitor.started(WorkersStarted(at=1.0, attempt=1, node="node-1"))
    monitor.started(WorkersStarted(at=30.0, attempt=1, node="node-2"))
    for at in range(31, 60):
        monitor.heartbeat(heartbeat({0: 0, 1: 0}), float(at))
        found += [(at, event) for event in monitor.due_events(float(at)) if isinstance(event, WorkersHung)]
    ((at, hung),) = found
    assert at == 40
    assert [failure.what for failure in hung.failures] == ["hung: no first step for 9.0 s, at train.py:33 in fetch"]
