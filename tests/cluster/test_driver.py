"""The driver with a fake fleet: what it sends, in which order, and what it makes of what it hears."""

from __future__ import annotations

import time

import pytest

from raylaunch.cluster.driver import Driver
from raylaunch.cluster.fleet import Draining, Hopeless
from raylaunch.core.events import WorkersExited
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.journal import replay
from raylaunch.core.result import result
from raylaunch.errors import ClusterError
from raylaunch.node.logs import Output
from raylaunch.node.messages import Learned, StoreOpen
from tests.fakes import READY, FakeFleet, Notebook


def drive(fleet: FakeFleet, **job):
    """Run to the end; the driver, the last action, and what was written."""
    book = Notebook()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    driver = Driver(asked, "run", fleet, book, book, time.monotonic())
    return driver, driver.run(), book


def orders(fleet: FakeFleet, *kinds: str):
    return [order for order in fleet.sent if order[0] in kinds]


def test_store_first_then_everybody():
    """No node is told of an attempt before its store listens; each gets one message; the next store is asked for."""
    fleet = FakeFleet(2)
    _, finish, _ = drive(fleet)
    assert finish.exit_code == 0
    assert orders(fleet, "store", "launch") == [
        ("store", "node-1", 1),
        ("launch", "node-1", 1, 5001),
        ("launch", "node-2", 1, 5001),
        ("store", "node-1", 2),
    ]


def test_restart_is_one_message_each():
    """After a crash each node gets a launch and nothing else: the store is open already, the stop is part of it."""
    fleet = FakeFleet(3)
    fleet.then[1] = lambda: fleet.fail(4)
    _, finish, _ = drive(fleet, max_restarts=1)
    assert finish.exit_code == 0
    second = fleet.sent.index(("launch", "node-1", 2, 5002))
    assert fleet.sent[second : second + 3] == [("launch", f"node-{index}", 2, 5002) for index in (1, 2, 3)]
    assert orders(fleet, "stop") == []
    assert fleet.sent.count(("store", "node-1", 2)) == 1


def test_lost_node_is_stopped_around():
    """A lost node's place is filled again; survivors are stopped, then launched with whoever came."""
    fleet = FakeFleet(2)

    def lose_and_come_back():
        fleet.lose("node-1")
        fleet.join("node-3")

    fleet.then[1] = lose_and_come_back
    driver, finish, _ = drive(fleet)
    assert finish.exit_code == 0
    assert ("replace", "node-1") in fleet.sent
    assert ("stop", "node-2", 1, 0.0, "SIGTERM") in fleet.sent
    assert driver.machine.roster == ("node-2", "node-3")
    assert ("store", "node-2", 2) in fleet.sent  # the store of attempt 2 was on the node that is gone


def test_times_of_death_are_on_our_clock():
    """A death 900 seconds before the word of it, by the node's clock, is 900 seconds before now by ours."""
    fleet = FakeFleet(1)
    fleet.then[1] = lambda: fleet.fail(0, at=1000.0, now=1900.0)
    _, _, book = drive(fleet, max_restarts=0)
    (exited,) = [entry.event for entry in book.entries if isinstance(entry.event, WorkersExited)]
    assert exited.failures[0].at == pytest.approx(exited.at - 900.0, abs=50)


def test_store_that_cannot_be_opened():
    """A node that cannot open a store is lost to the run, with the reason."""
    fleet = FakeFleet(1)
    fleet.open_store = lambda node, attempt: fleet.say(node, StoreOpen(attempt=attempt, port=0, why="no ports"))
    _, finish, book = drive(fleet, join_timeout=0.05)
    assert finish.exit_code == 3
    assert any("cannot open a store: no ports" in str(entry.event) for entry in book.entries)


def test_word_of_a_node_that_was_given_up():
    """An agent that was given up may have spoken before: its node does not join."""
    fleet = FakeFleet(2)
    fleet.given_up = {"node-1"}
    driver, finish, _ = drive(fleet, placement_timeout=0.05)
    assert finish.exit_code == 3
    assert set(driver.machine.nodes) == {"node-2"}


def test_no_torch():
    """Nodes without torch end the run at once: waiting would not bring it."""
    fleet = FakeFleet(1)
    fleet.ready = READY.__class__(start_method="spawn", why=("cannot preload `torch`: gone",), torch=False, pid=1)
    with pytest.raises(ClusterError, match=r"no worker can be started on 10\.0\.0\.1"):
        drive(fleet)


def test_what_cannot_be_preloaded_is_said_once():
    """All nodes find out the same, in one attempt after the other."""
    fleet = FakeFleet(2)
    word = "`a` is not preloaded: importing it starts 1 thread"
    fleet.then[1] = lambda: ([fleet.say(node, Learned(lesson=None, why=word)) for node in fleet.names], fleet.fail(1))
    fleet.then[2] = lambda: (fleet.say("node-1", Learned(lesson=None, why="")), fleet.finish())
    _, _, book = drive(fleet, max_restarts=1)
    assert book.lines == [word]


def test_stop_asked_twice():
    """The first wish stops politely, the second at once; both may come from a signal handler."""
    fleet = FakeFleet(1)
    fleet.stop = lambda *order: fleet.sent.append(("stop", *order))  # workers that do not stop
    book = Notebook()
    driver = Driver(Job(entrypoint=Entrypoint(script="train.py")), "run", fleet, book, book, time.monotonic())
    fleet.then[1] = lambda: (driver.signalled("SIGINT"), driver.signalled("SIGINT"))
    assert driver.run().exit_code == 130
    assert orders(fleet, "stop") == [("stop", "node-1", 1, 30.0, "SIGINT"), ("stop", "node-1", 1, 0.0, "SIGTERM")]


def test_signals_to_forward():
    """They go to every node, and the run ends as if nothing had happened."""
    fleet = FakeFleet(2)
    book = Notebook()
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, signals_to_forward=["SIGUSR1"])
    driver = Driver(job, "run", fleet, book, book, time.monotonic())
    fleet.forward = lambda *order: (fleet.sent.append(("forward", *order)), fleet.finish())
    fleet.then[1] = lambda: driver.signalled("SIGUSR1")
    assert driver.run().exit_code == 0
    assert orders(fleet, "forward")[:2] == [("forward", "node-1", 1, "SIGUSR1"), ("forward", "node-2", 1, "SIGUSR1")]


def test_deadlines_are_kept():
    """Nothing arrives: the tick that the machine asked for comes, and the run ends."""
    fleet = FakeFleet(1)
    fleet.start = lambda tell: None
    _, finish, _ = drive(fleet, placement_timeout=0.05)
    assert finish.exit_code == 3
    assert "0 of 1 nodes" in finish.why


def test_the_host_of_the_driver_itself_is_drained():
    """Nothing can be done about it; but it is said, whether nodes of the run are there or not."""
    fleet = FakeFleet(1)
    notice = Draining(host="id-head", deadline=time.monotonic() + 30, why="", ours=True)
    fleet.then[1] = lambda: (fleet.tell(notice), fleet.finish())
    _, finish, book = drive(fleet)
    assert finish.exit_code == 0
    assert book.lines == ["the host that this command runs on is being drained: with it the run ends"]


def test_what_ends_all_ends_the_run():
    """Whoever asks for nodes cannot do so any more: nobody waits for what will not come."""
    fleet = FakeFleet(1)
    fleet.then[1] = lambda: fleet.tell(Hopeless(error=ClusterError("no more nodes can be asked for")))
    with pytest.raises(ClusterError, match="no more nodes"):
        drive(fleet)


def test_output_and_words_reach_the_observer():
    """What shown ranks write is passed on, and what a fork server has to say about itself."""
    fleet = FakeFleet(1)
    fleet.ready = READY.__class__(start_method="spawn", why=("3 threads are running",), torch=True, pid=1)

    def write():
        fleet.say("node-1", output=[Output(rank=0, stream="stdout", data=b"hello\n")])
        fleet.finish()

    fleet.then[1] = write
    _, _, book = drive(fleet)
    assert [part.data for part in book.output] == [b"hello\n"]
    assert book.lines == ["node-1: 3 threads are running"]


def test_journal_is_the_truth():
    """The entries replay to the same actions, and the result is built from them alone."""
    fleet = FakeFleet(2)
    fleet.then[1] = lambda: fleet.fail(3)
    fleet.then[2] = lambda: fleet.fail(1)
    driver, _, book = drive(fleet, max_restarts=2)
    events = [entry.event for entry in book.entries if entry.event is not None]
    assert replay(driver.machine.job, events) == book.entries
    found = result(book.entries)
    assert found.ok
    assert [len(attempt.failures) for attempt in found.attempts] == [1, 1, 0]
