"""How the driver finds hangs by heartbeats and stacks, with a fake fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from raylaunch.capabilities.hangs.driver import HangWatch
from raylaunch.cluster.capability import Capability
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import Event, WorkersHung, WorkersStarted
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import ResizeTimes, Running, World
from raylaunch.core.monitoring.hang_detector import AUTO_FLOOR, HangDetector
from raylaunch.core.monitoring.hang_policy import LOOKS
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.rank_progress import WARM_UP
from raylaunch.core.placement.environment import Member
from raylaunch.node.protocol.node_goal import DumpStacks
from raylaunch.node.protocol.node_status import StacksDumped
from tests.fakes import FakeFleet, RunRecorder, driver_port

FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'
REDUCE = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
)


def driver_of(fleet: FakeFleet, **job):
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    hangs = Capability(name="hangs", driver=HangWatch)
    return Driver(asked, "run", fleet, recorder, recorder, time.monotonic(), capabilities=(hangs,)), recorder


def found_hangs(recorder: RunRecorder) -> list[WorkersHung]:
    return [entry.event for entry in recorder.entries if isinstance(entry.event, WorkersHung)]


def heartbeat(marks: dict[int, int], *, attempt: int = 1, age: float = 0.0) -> Heartbeat:
    """Return a heartbeat; `marks`: how many steps each rank has done, the last of them `age` seconds ago."""
    return Heartbeat(
        attempt=attempt,
        marks=tuple(
            WorkerProgress(rank=rank, marks=count, age=age, first_age=age, step=count - 1)
            for rank, count in marks.items()
        ),
    )


class Watched:
    """The watch for hangs of an attempt with a worker on each node, without a driver's loop."""

    def __init__(self, fleet: FakeFleet, hang_timeout: float | str, say: Callable[[str], None] = lambda _: None):
        self.fleet = fleet
        self.machine = Machine(Job(hang_timeout=hang_timeout))
        self.monitor = ProgressMonitor()
        self.watch = HangWatch(
            driver_port(
                machine=self.machine,
                send=fleet.send,
                say=say,
                progress=lambda: self.monitor.world,
                write_stacks=lambda *_: None,
            )
        )
        self.begin(1)

    def begin(self, attempt: int) -> None:
        members = tuple(Member(node=name, address="10.0.0.1", nproc=1) for name in self.fleet.names)
        self.machine.run.world = World(attempt=attempt, members=members, size=len(members))
        self.machine.run.state = Running(status="", resize=ResizeTimes())
        self.monitor.begin(attempt, len(members))
        self.watch.launched(0.0)

    def started(self, node: str, at: float) -> None:
        word = WorkersStarted(at=at, attempt=self.machine.attempt, node=node)
        self.watch.started(word)

    def answer(self, node: str, order: DumpStacks, stacks: Sequence[Stack]) -> None:
        self.watch.stacks(StacksDumped(node=node, attempt=order.attempt, stacks=tuple(stacks)))

    def beat(self, beat: Heartbeat, now: float) -> list[Event]:
        """Take a heartbeat; return what is due then."""
        self.watch.heartbeat(self.monitor.heartbeat(beat, now), now)
        return [*self.watch.due_events(now)]


def run_with_hang(fleet: FakeFleet, **job):
    """Run two nodes with one worker each, which make steps and then none."""

    def train():
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
    (hung,) = found_hangs(recorder)
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
    (hung,) = found_hangs(recorder)
    assert {rank for group in hung.groups for rank in group.ranks} == {0, 1}


def test_answers_of_an_attempt_that_has_ended_meanwhile_are_dropped():
    """A worker died before its node could answer, and that ended the attempt."""
    fleet = FakeFleet(2, nproc=1)
    fleet.overrides[DumpStacks] = lambda node, _: fleet.fail(0) if node == "node-1" else None
    driver, finish, recorder = run_with_hang(fleet)
    assert finish.exit_code == 0
    assert found_hangs(recorder) == []
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


def test_workers_are_not_examined_while_none_can_hang(monkeypatch):
    """The heartbeats of a thousand nodes each second are only stored."""
    watched = Watched(FakeFleet(1, nproc=1), "auto")
    checked: list[float] = []
    check = HangDetector.check
    monkeypatch.setattr(HangDetector, "check", lambda self, now: (checked.append(now), check(self, now))[1])
    for at in range(1, 200):
        watched.beat(heartbeat({0: at}), float(at))
    assert checked == []


def test_a_hang_is_reported_once():
    """Though it lasts until another attempt begins."""
    fleet = FakeFleet(1, nproc=1)
    watched = Watched(fleet, 2.0)
    fleet.overrides[DumpStacks] = lambda node, order: (fleet.record(node, order), watched.answer(node, order, ()))
    found = []
    for at in range(1, 60):
        found += watched.beat(heartbeat({0: min(at, WARM_UP + 1)}, age=max(0.0, at - WARM_UP - 1)), float(at))
        found += watched.watch.due_events(at + 0.5)
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
        self.in_full: list[tuple[int, ...]] = []
        self.stacks = stacks
        self.fleet.overrides[DumpStacks] = self.answer
        self.watched = Watched(self.fleet, "auto", self.messages.append)
        self.begin(1)

    def begin(self, attempt: int) -> None:
        self.attempt, self.now = attempt, 0.0
        self.watched.begin(attempt)
        for marks in range(1, WARM_UP + 1):
            self.send_heartbeat(marks)

    def answer(self, node: str, order: DumpStacks) -> None:
        rank = self.fleet.names.index(node)
        self.sample_counts[rank] += 1
        self.in_full.append(order.in_full)
        self.watched.answer(node, order, [self.stacks[rank](self.sample_counts[rank])])

    def send_heartbeat(self, marks: int, age: float = 0.0) -> list[Event]:
        self.now += 0.5
        return self.watched.beat(heartbeat({0: marks, 1: marks}, attempt=self.attempt, age=age), self.now)

    def run_silent(self, silence: float) -> list[float]:
        """Let the workers make no steps for so long; return after how many seconds each hang was reported."""
        found = []
        last = self.now
        while self.now - last < silence:
            found += [self.now - last for _ in self.send_heartbeat(WARM_UP, self.now + 0.5 - last)]
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
    """It is reported as soon as all samples show it, and all threads are known: only workers that are to end write them."""
    fleet = HangingFleet(at_line(0, REDUCE), at_line(1, REDUCE))
    (hung_at,) = fleet.run_silent(900)
    assert AUTO_FLOOR < hung_at < AUTO_FLOOR + 2 * LOOKS
    assert fleet.in_full == [()] * 2 * LOOKS + [(0,), (1,)]


def test_with_auto_a_step_while_all_threads_are_written_is_no_hang():
    """The next silence is sampled anew."""
    fleet = HangingFleet(at_line(0, REDUCE), at_line(1, REDUCE))
    answer, asked = fleet.answer, []
    fleet.fleet.overrides[DumpStacks] = lambda *word: asked.append(word) if word[1].in_full else answer(*word)
    last = fleet.now
    while not asked:
        assert fleet.send_heartbeat(WARM_UP, fleet.now + 0.5 - last) == []
    assert [hung for more in range(1, 9) for hung in fleet.send_heartbeat(WARM_UP + more)] == []
    assert fleet.in_full == [()] * 2 * LOOKS


def test_with_auto_a_step_ends_the_probe():
    """No hang is reported."""
    fleet = HangingFleet(at_line(0, REDUCE), at_line(1, REDUCE))
    fleet.run_silent(AUTO_FLOOR + 3)
    assert fleet.sample_counts[0] > 1
    found = []
    for more in range(1, 4 * LOOKS):
        found += fleet.send_heartbeat(WARM_UP + more)
    assert found == []
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
        watched.answer(node, order, [stack])

    fleet.overrides[DumpStacks] = answer
    watched = Watched(fleet, "auto", lambda text: said.append((now, text)))
    for at in range(1, 500):
        now = float(at)
        if at in (10, 20):
            watched.started(fleet.names[at // 10 - 1], now)
        assert watched.beat(heartbeat({0: 0, 1: 0}), now) == []
    assert taken == [80.0, 80.0, 140.0, 140.0]
    assert said == [
        (141.0, "1 of 2 ranks has not joined the others after 121 s: rank 1 on node-2, at train.py:33 in fetch")
    ]


@pytest.mark.parametrize(("timeout", "marks"), [("off", 0), (1000.0, 1)])
def test_nobody_is_examined_at_the_start_without_need(timeout, marks):
    """With `hang_timeout: off`, or if all workers have completed a step."""
    fleet = FakeFleet(1, nproc=1)
    watched = Watched(fleet, timeout)
    watched.started("node-1", 1.0)
    for at in range(1, 200):
        watched.beat(heartbeat({0: marks}, age=float(at)), float(at))
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
    watched = Watched(fleet, 8.0)
    fleet.overrides[DumpStacks] = lambda node, order: watched.answer(node, order, fleet.stacks[node])
    found = []
    watched.beat(heartbeat({0: 0}), 1.0)
    watched.started("node-1", 1.0)
    watched.started("node-2", 30.0)
    for at in range(31, 60):
        found += [(at, event) for event in watched.beat(heartbeat({0: 0, 1: 0}), float(at))]
    ((at, hung),) = found
    assert at == 40
    assert [failure.what for failure in hung.failures] == ["hung: no first step for 9.0 s, at train.py:33 in fetch"]
