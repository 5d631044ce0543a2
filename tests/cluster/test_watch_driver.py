"""The driver with a fake fleet: what it makes of workers' signs of life."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from raylaunch.cluster.driver import Driver
from raylaunch.cluster.orders import Orders
from raylaunch.cluster.watch import Watch
from raylaunch.core.actions import AskCheckpoint, Launch, Readmit, Release, Shun, Stop
from raylaunch.core.events import Progressed, WorkersCheckpointed, WorkersExited, WorkersHung
from raylaunch.core.evidence import LOOKS
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.journal import replay
from raylaunch.core.machine import Machine
from raylaunch.core.progress import AUTO_FLOOR, WARM_UP, Progress
from raylaunch.core.pulse import Mark, Pulse
from raylaunch.core.ranks import Member, assign
from raylaunch.core.stacks import Stack
from raylaunch.node.messages import WorkersStacks
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


class Saves(FakeFleet):
    """Workers of node-1 know of checkpoints that are asked for. `grace`: what happens before they stop."""

    grace: Callable[[], None] = staticmethod(lambda: None)

    def ask_checkpoint(self, node, attempt, step):
        self.say(node, WorkersCheckpointed(at=0.0, attempt=attempt, node=node, step=None))

    def stop(self, node, attempt, grace, signal):
        self.grace()
        super().stop(node, attempt, grace, signal)


def resized(train: Callable[[FakeFleet], None], grace: Callable[[FakeFleet], None] = lambda _: None):
    """The first of two nodes is drained while they train."""
    fleet = Saves(2, nproc=1)
    fleet.grace = lambda: grace(fleet)
    fleet.then[1] = lambda: (train(fleet), fleet.drain("node-1"))
    driver, book = driver_of(fleet, nnodes="1:2")
    assert driver.run().exit_code == 0
    return book


def test_steps_that_are_made_in_the_grace_count():
    """By a script that has its own mind about SIGTERM: it is those that are lost."""
    book = resized(
        lambda fleet: fleet.say("node-1", pulse=pulse({0: 3, 1: 3})),
        lambda fleet: fleet.say("node-1", pulse=pulse({0: 90, 1: 90})),
    )
    assert [event.marks for event in events(book, Progressed) if event.attempt == 1][-1] == 90


def test_who_had_no_part_in_saving_is_named():
    """A script of which only some ranks ask; of one that knows nothing of it there is nothing to be said."""
    asked = Mark(rank=0, marks=3, age=0.0, step=2, asked=2)
    book = resized(lambda fleet: fleet.say("node-1", pulse=Pulse(attempt=1, marks=(asked,))))
    assert [line for line in book.lines if "rank 1 never asked `should_checkpoint`" in line] != []
    knows_nothing = Mark(rank=0, marks=3, age=0.0, step=2)
    book = resized(lambda fleet: fleet.say("node-1", pulse=Pulse(attempt=1, marks=(knows_nothing,))))
    assert book.lines == []


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


# With `auto`: what is seen decides.


class Silent:
    """Two nodes of one worker each that have stepped, and fall silent; a second for each look at them."""

    def __init__(self, *stacks: Callable[[int], Stack]) -> None:
        """`stacks`: what each rank says at its n-th look."""
        self.fleet = FakeFleet(2, nproc=1)
        self.said: list[str] = []
        self.asked = [0, 0]
        self.stacks = stacks
        self.fleet.dump_stacks = self.answer
        self.watch = Watch(Progress(None, auto=True), self.fleet, lambda *_: None, self.said.append)
        self.begin(1)

    def begin(self, attempt: int) -> None:
        self.attempt, self.now = attempt, 0.0
        members = [Member(node=name, address="10.0.0.1", nproc=1) for name in self.fleet.names]
        self.watch.begin(assign(attempt, members))
        for marks in range(1, WARM_UP + 1):
            self.pulse(marks)

    def answer(self, node: str, attempt: int) -> None:
        rank = self.fleet.names.index(node)
        self.asked[rank] += 1
        stack = self.stacks[rank](self.asked[rank])
        self.watch.stacks(WorkersStacks(node=node, attempt=attempt, stacks=(stack,)))

    def pulse(self, marks: int, age: float = 0.0) -> None:
        self.now += 0.5
        self.watch.take(pulse({0: marks, 1: marks}, attempt=self.attempt, age=age), self.now)

    def until(self, silence: float) -> list[float]:
        """After how long each hang was told of."""
        found = []
        last = self.now
        while self.now - last < silence:
            self.pulse(WARM_UP, self.now + 0.5 - last)
            found += [self.now - last for event in self.watch.due(self.now) if isinstance(event, WorkersHung)]
        return found


def at_line(rank: int, text: str) -> Callable[[int], Stack]:
    return lambda _: Stack(rank=rank, state="S", text=text)


def moves(rank: int) -> Callable[[int], Stack]:
    return lambda look: Stack(rank=rank, state="S", text=FETCH.replace("33", str(look)))


def test_with_auto_nobody_who_works_is_taken_for_hanging():
    """It is looked at again, later and later, and a person is told."""
    world = Silent(moves(0), at_line(1, REDUCE))
    assert world.until(3000) == []
    assert world.asked == [4 * LOOKS, 4 * LOOKS]  # after 5, 10, 20 and 40 minutes
    assert all(f"rank 0 works, at train.py:{at * LOOKS} in fetch" in said for at, said in enumerate(world.said, 1))
    assert len(world.said) == 4
    (hung_at,) = world.until(10**4)
    assert hung_at > 4000


def test_with_auto_those_who_wait_for_nobody_are_a_hang():
    """As soon as it was seen that all do nothing else."""
    (hung_at,) = Silent(at_line(0, REDUCE), at_line(1, REDUCE)).until(900)
    assert AUTO_FLOOR < hung_at < AUTO_FLOOR + 2 * LOOKS


def test_with_auto_a_step_in_the_midst_of_the_looks_ends_them():
    """Nothing is said of it."""
    world = Silent(at_line(0, REDUCE), at_line(1, REDUCE))
    world.until(AUTO_FLOOR + 3)
    assert world.asked[0] > 1
    found = []
    for more in range(1, 4 * LOOKS):
        world.pulse(WARM_UP + more)
        found += world.watch.due(world.now)
    assert [event for event in found if isinstance(event, WorkersHung)] == []
    assert (world.said, world.asked[0] < LOOKS) == ([], True)


def test_a_place_where_worlds_were_ended_is_borne_for_longer():
    """A healthy pause there, in which nobody seems to work, would be met again and again."""
    world = Silent(at_line(0, FETCH), at_line(1, REDUCE))
    found = []
    for attempt in (1, 2, 3):
        world.begin(attempt)
        found += world.until(3000)
    assert [round(hung_at / AUTO_FLOOR) for hung_at in found] == [2, 4, 8]
