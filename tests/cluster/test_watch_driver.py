"""The driver with a fake fleet: what it makes of workers' signs of life."""

from __future__ import annotations

import time

import pytest

from raylaunch.cluster.driver import Driver
from raylaunch.cluster.orders import Orders
from raylaunch.cluster.watch import Watch
from raylaunch.core.actions import AskCheckpoint, Launch, Readmit, Release, Shun, Stop
from raylaunch.core.events import Progressed, WorkersExited, WorkersHung
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.journal import replay
from raylaunch.core.machine import Machine
from raylaunch.core.progress import WARM_UP, Mark, Progress, Pulse
from raylaunch.core.ranks import Member, assign
from raylaunch.core.stacks import Stack
from tests.fakes import FakeFleet, Notebook

FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'
REDUCE = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
)


def driver_of(fleet: FakeFleet, **job):
    book = Notebook()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    return Driver(asked, "run", fleet, book, book, time.monotonic()), book


def events(book: Notebook, *kinds: type):
    return [entry.event for entry in book.entries if isinstance(entry.event, kinds)]


def pulse(marks: dict[int, int], *, attempt: int = 1, age: float = 0.0) -> Pulse:
    """How many steps each rank has done, the last one so many seconds ago."""
    return Pulse(
        attempt=attempt,
        marks=tuple(
            Mark(rank=rank, marks=count, age=age, first_age=age, step=count - 1, asked=count - 1)
            for rank, count in marks.items()
        ),
    )


def test_how_far_an_attempt_came_is_told_of():
    """Of all nodes; at the latest right before the word that ends the attempt."""
    fleet = FakeFleet(2, nproc=1)

    def train():
        fleet.say("node-1", pulse=pulse({0: 1}))
        fleet.say("node-2", pulse=pulse({1: 2}))
        fleet.say("node-1", pulse=pulse({0: 9}))
        fleet.say("node-2", pulse=pulse({1: 8}))
        fleet.fail(0)

    fleet.then[1] = train
    driver, book = driver_of(fleet, max_restarts=1)
    assert driver.run().exit_code == 0
    told = events(book, Progressed, WorkersExited)
    ended = next(index for index, event in enumerate(told) if isinstance(event, WorkersExited))
    last = told[ended - 1]
    assert isinstance(last, Progressed)
    assert (last.attempt, last.marks, last.high) == (1, 9, 8)


def test_the_first_steps_are_told_of_while_the_attempt_goes_on():
    """As soon as all workers have done one, though nothing else happens."""
    fleet = FakeFleet(1, nproc=2, beat=0.05)
    fleet.then[1] = lambda: fleet.say("node-1", pulse=pulse({0: 1, 1: 1}))
    driver, book = driver_of(fleet)
    book.decided = lambda entry, _: fleet.finish() if isinstance(entry.event, Progressed) else None
    assert driver.run().exit_code == 0
    assert [event.marks for event in events(book, Progressed)] == [1]


def test_progress_is_in_the_journal_where_the_machine_saw_it():
    """So a replay decides the same."""
    fleet = FakeFleet(1)

    def train():
        fleet.say("node-1", pulse=pulse({0: 1, 1: 1}))
        fleet.say("node-1", pulse=pulse({0: 5, 1: 5}))
        fleet.fail(0)

    fleet.then[1] = train
    driver, book = driver_of(fleet, max_restarts=1)
    driver.run()
    seen = [entry.event for entry in book.entries if entry.event is not None]
    assert replay(driver.machine.job, seen) == book.entries
    assert events(book, Progressed) != []


def hanging(fleet: FakeFleet, **job):
    """Two nodes of one worker each that step, and then fall silent."""

    def train():
        for count in range(1, WARM_UP + 2):
            fleet.say("node-1", pulse=pulse({0: count}))
            fleet.say("node-2", pulse=pulse({1: count}))
        fleet.say("node-1", pulse=pulse({0: WARM_UP + 1}, age=5.0))
        fleet.say("node-2", pulse=pulse({1: WARM_UP + 1}, age=5.0))

    fleet.then[1] = train
    driver, book = driver_of(fleet, hang_timeout=2.0, max_restarts=1, **job)
    return driver, driver.run(), book


def test_a_hang_is_looked_into_before_it_is_ended():
    """All nodes are asked what their workers do; the odd one is at fault, and the rest is written for a person."""
    fleet = FakeFleet(2, nproc=1)
    fleet.stacks = {
        "node-1": (Stack(rank=0, state="S", text=REDUCE),),
        "node-2": (Stack(rank=1, state="S", text=FETCH),),
    }
    driver, finish, book = hanging(fleet)
    assert finish.exit_code == 0
    (hung,) = events(book, WorkersHung)
    assert [failure.rank for failure in hung.failures] == [1]
    assert [group.ranks for group in hung.groups] == [(1,), (0,)]
    assert [order for order in fleet.sent if order[0] == "stacks"] == [("stacks", "node-1", 1), ("stacks", "node-2", 1)]
    assert "train.py:33 in fetch" in book.stacks[1]
    assert "what all workers were doing is in attempt-1/stacks.txt" in book.lines
    assert (driver.machine.attempt, driver.machine.restarts) == (2, 1)


def test_a_node_that_cannot_answer_is_not_waited_for():
    fleet = FakeFleet(2, nproc=1)
    ask = fleet.dump_stacks
    fleet.stacks = {"node-1": (Stack(rank=0, state="S", text=REDUCE),)}
    fleet.dump_stacks = lambda node, attempt: ask(node, attempt) if node == "node-1" else None
    _, finish, book = hanging(fleet)
    assert finish.exit_code == 0
    (hung,) = events(book, WorkersHung)
    assert {rank for group in hung.groups for rank in group.ranks} == {0, 1}


def test_answers_of_an_attempt_that_has_ended_meanwhile_are_dropped():
    """A worker died before its node could answer: that is what ends the attempt."""
    fleet = FakeFleet(2, nproc=1)
    fleet.dump_stacks = lambda node, attempt: fleet.fail(0) if node == "node-1" else None
    driver, finish, book = hanging(fleet)
    assert finish.exit_code == 0
    assert events(book, WorkersHung) == []
    assert driver.machine.restarts == 1


def test_nobody_hangs_where_that_is_off():
    fleet = FakeFleet(1, nproc=1)

    def train():
        for count in range(1, WARM_UP + 2):
            fleet.say("node-1", pulse=pulse({0: count}))
        fleet.say("node-1", pulse=pulse({0: WARM_UP + 1}, age=1e6))
        fleet.finish()

    fleet.then[1] = train
    driver, _ = driver_of(fleet, hang_timeout="off")
    assert driver.run().exit_code == 0
    assert [order for order in fleet.sent if order[0] == "stacks"] == []


def test_all_workers_are_looked_through_once_at_the_end_of_a_run():
    """Not for each node that has finished: of a thousand, that would take the driver longer than they took to end."""
    fleet = FakeFleet(5, nproc=1)

    def train():
        for rank, node in enumerate(fleet.names):
            fleet.say(node, pulse=pulse({rank: 9}))
        fleet.finish()

    fleet.then[1] = train
    driver, _ = driver_of(fleet)
    looked: list[float] = []
    so_far = driver._watch._progress.so_far
    driver._watch._progress.so_far = lambda at: (looked.append(at), so_far(at))[1]
    assert driver.run().exit_code == 0
    assert len(looked) == 1


def test_no_worker_is_looked_at_while_none_can_hang():
    """But for the word of the first steps: what is heard of a thousand nodes each second is only noted."""
    fleet = FakeFleet(1, nproc=1)
    progress = Progress(None, auto=True)
    watch = Watch(progress, fleet, lambda *_: None)
    watch.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    looked: list[float] = []
    hang = progress.hang
    progress.hang = lambda now: (looked.append(now), hang(now))[1]
    for at in range(1, 200):
        watch.take(pulse({0: at}), float(at))
        list(watch.due(float(at)))
    assert len(looked) < 5


@pytest.fixture
def told():
    """What orders become, with nobody to be heard."""
    fleet = FakeFleet(2)
    progress = Progress(None, auto=True)
    given_up: list[str] = []
    orders = Orders(Machine(Job()), "run", fleet, Watch(progress, fleet, lambda *_: None), given_up.append)
    return orders, fleet, progress, given_up


def test_all_are_to_save_at_one_step_ahead_of_all(told):
    orders, fleet, progress, _ = told
    progress.begin(1, range(2))
    progress.take(pulse({0: 10, 1: 14}), 100.0)
    orders.perform([AskCheckpoint(attempt=1, nodes=("node-1", "node-2"), why="")], 100.0)
    (first, second) = [order for order in fleet.sent if order[0] == "checkpoint"]
    assert first[3] == second[3] > 14
    assert (first[1], second[1]) == ("node-1", "node-2")


def test_a_node_that_is_given_up_is_not_believed_any_more(told):
    orders, fleet, _, given_up = told
    orders.perform([Release(node="node-1", why=""), Shun(host="h", why=""), Readmit(host="h", why="")], 0.0)
    assert given_up == ["node-1"]
    assert fleet.sent == [("release", "node-1"), ("shun", "h"), ("readmit", "h")]


def test_a_stop_with_grace_is_sent_to_all(told):
    """Only one without is part of the launch that comes with it."""
    orders, fleet, _, _ = told
    launch = Launch(attempt=2, roster=("node-1",), why="")
    orders.perform([Stop(attempt=1, nodes=("node-1", "node-2"), grace=0.0, why=""), launch], 0.0)
    assert [order[1] for order in fleet.sent if order[0] == "stop"] == ["node-2"]
    orders.perform([Stop(attempt=1, nodes=("node-1",), grace=3.0, why=""), launch], 0.0)
    assert [order[1] for order in fleet.sent if order[0] == "stop"] == ["node-2", "node-1"]


def test_a_hang_is_told_of_once():
    """Whatever the machine makes of it; the same is seen again until another attempt begins."""
    fleet = FakeFleet(1, nproc=1)
    watch = Watch(Progress(2.0, auto=False), fleet, lambda *_: None)
    watch.begin(assign(1, [Member(node="node-1", address="10.0.0.1", nproc=1)]))
    found = []
    for at in range(1, 60):
        watch.take(pulse({0: min(at, WARM_UP + 1)}, age=max(0.0, at - WARM_UP - 1)), float(at))
        found.extend(watch.due(float(at)))
        found.extend(watch.due(at + 0.5))
    assert [type(event) for event in found].count(WorkersHung) == 1
    assert [order for order in fleet.sent if order[0] == "stacks"] == [("stacks", "node-1", 1)]
