"""Who believes how long in whom: the agent's lease, the driver's patience, and the line between them. No Ray."""

from __future__ import annotations

import socket
import threading

import pytest

from raylaunch.cluster import lease as leases
from raylaunch.cluster import lifeline
from raylaunch.cluster.fleet import Gone
from raylaunch.cluster.lease import Lease
from raylaunch.cluster.lifeline import Anchor, Lifelines, Severed
from raylaunch.cluster.presence import Presence
from raylaunch.cluster.silence import Silence, beat
from raylaunch.worker.page import lease_clock


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(leases, "lease_clock", found)
    return found


def seconds(renewals: list[int]) -> list[float]:
    return [until / 1e9 for until in renewals]


def test_a_lease_runs_from_the_last_answer_that_is_known_to_have_arrived(clock):
    """The first answer counts when it is sent: unheard, it starts nothing. Each later one when the next call comes."""
    told: list[int] = []
    lease = Lease(10.0, told.append, lambda: None)
    lease.called()
    assert told == []
    lease.answering()
    assert seconds(told) == [1009.0]
    clock.now = 1001.0
    lease.called()
    clock.now = 1002.0
    lease.answering()  # it may never arrive
    assert seconds(told) == [1009.0, 1009.0]
    clock.now = 1003.0
    lease.called()
    assert seconds(told)[-1] == 1011.0


def test_a_lease_that_is_over_is_not_renewed(clock):
    """A call may have waited while the driver, or this process, stood still: the workers have ended by then."""
    told: list[int] = []
    lease = Lease(10.0, told.append, lambda: None)
    lease.answering()
    clock.now = 1008.0
    lease.called()
    lease.answering()
    assert not lease.over
    clock.now = 1009.0
    assert lease.over
    lease.called()
    assert seconds(told)[-1] == 1009.0


def test_the_end_of_a_lease_is_the_end_of_the_process():
    ended = threading.Event()
    told: list[int] = []
    lease = Lease(0.3, told.append, ended.set)
    lease.start()
    lease.answering()
    assert ended.wait(100)
    assert lease_clock() >= told[-1]


def test_a_machine_that_slept_sees_that_its_lease_is_over(clock):
    """Time went on elsewhere. Whoever waits for the end of the lease is not woken by that: he looks by himself."""

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    waits, ended = threading.Event(), threading.Event()
    told: list[int] = []
    lease = Lease(3600.0, told.append, ended.set)
    lease._released = Waited()
    lease.start()
    lease.answering()
    assert waits.wait(100)
    clock.now += 3600.0
    assert ended.wait(100)
    lease.called()
    assert seconds(told) == [1000.0 + 0.9 * 3600.0]


def test_a_driver_that_never_calls_is_gone(monkeypatch):
    monkeypatch.setattr(leases, "_FIRST_CALL_SECONDS", 0.05)
    ended = threading.Event()
    Lease(5.0, lambda _: None, ended.set).start()
    assert ended.wait(100)


def test_an_orderly_end_may_outlast_the_lease(clock):
    lease = Lease(0.3, lambda _: None, lambda: None)
    lease.answering()
    lease.farewell()
    clock.now += 5.0
    assert not lease.over


def test_the_lease_ends_before_the_driver_stops_believing(clock):
    """In any order of sending, arriving and calling: what the agent counts on is never later than what the driver does."""
    timeout = 5.0
    told: list[int] = []
    silence = Silence(timeout)
    lease = Lease(timeout, told.append, lambda: None)
    for step, travel in enumerate([0.0, 0.4, 1.9, 0.0, 3.0, 0.2]):
        lease.answering()
        clock.now += travel
        if step == 0:
            silence.watch("node-1", clock.now)
        silence.heard("node-1", clock.now)
        lease.called()
        assert told[-1] / 1e9 < clock.now + timeout
        assert silence.silent(told[-1] / 1e9) == []


def test_a_node_that_says_nothing_for_too_long_is_silent():
    silence = Silence(5.0)
    silence.watch("node-1", 100.0)
    silence.watch("node-2", 101.0)
    assert silence.next_look == 105.0
    assert silence.silent(104.9) == []
    assert silence.silent(105.0) == ["node-1"]
    silence.forget("node-1")
    assert silence.silent(105.1) == []
    assert silence.next_look == 106.0


def test_what_is_heard_moves_the_time_on():
    silence = Silence(5.0)
    silence.watch("node-1", 100.0)
    silence.heard("node-1", 103.0)
    assert silence.silent(105.0) == []
    assert silence.next_look == 108.0
    assert silence.silent(108.0) == ["node-1"]


def test_a_driver_that_stood_still_listens_before_it_judges():
    """Nobody had a chance to be heard: what waits in its sockets comes first. Who says nothing then is lost."""
    silence = Silence(5.0)
    silence.watch("node-1", 100.0)
    silence.watch("node-2", 100.0)
    assert silence.silent(200.0) == []
    silence.heard("node-1", 200.1)
    assert silence.next_look == 201.0
    assert silence.silent(201.0) == ["node-2"]


def test_words_before_a_node_is_known_to_be_up_count():
    """The word that it is up may have waited; what came meanwhile is known."""
    silence = Silence(5.0)
    silence.heard("node-1", 100.0)
    silence.heard("node-1", 104.0)
    silence.watch("node-1", 100.0)
    assert silence.next_look == 109.0


def test_beats_are_several_to_a_timeout():
    assert beat(5.0) == 1.0
    assert beat(60.0) == 1.0
    assert beat(1.5) == pytest.approx(0.3)


class Lines:
    """Lifelines that hold until they are told otherwise."""

    def __init__(self, *nodes: str) -> None:
        self.held = set(nodes)
        self.let: list[str] = []

    def holds(self, node: str) -> bool:
        return node in self.held

    def let_go(self, node: str) -> None:
        self.let.append(node)


def test_ray_alone_is_not_believed_of_a_node_whose_line_holds():
    """A raylet may be gone, or a connection, and the agent not: it is told to end, and its end is waited for."""
    lines = Lines("node-1")
    presence = Presence(5.0, lines)
    presence.came_up("node-1", 100.0)
    assert presence.doubted(Gone(node="node-1", why="its raylet died"))
    assert lines.let == ["node-1"]
    assert presence.severed("node-1").why == "its raylet died"


def test_a_node_that_ray_gave_up_and_that_does_not_answer_is_lost_by_its_silence():
    presence = Presence(5.0, Lines("node-1"))
    presence.came_up("node-1", 100.0)
    presence.doubted(Gone(node="node-1", why="its raylet died"))
    (gone,) = presence.silent(105.0)
    assert gone.silent
    assert "nothing was heard of it for 5 s" in gone.why


def test_ray_is_believed_where_nothing_says_otherwise():
    presence = Presence(5.0, Lines())
    presence.came_up("node-1", 100.0)
    assert not presence.doubted(Gone(node="node-1", why="its agent died"))
    assert not Presence(5.0, None).doubted(Gone(node="node-1", why="its agent died"))


def test_an_agent_that_was_never_up_has_no_workers_to_wait_for():
    assert not Presence(5.0, Lines("node-1")).doubted(Gone(node="node-1", why="its agent died"))


def test_a_name_that_was_given_up_is_past_for_ever():
    lines = Lines("node-1")
    presence = Presence(5.0, lines)
    presence.came_up("node-1", 100.0)
    presence.give_up("node-1")
    presence.heard("node-1", 101.0)
    assert presence.is_past("node-1")
    assert lines.let == ["node-1"]
    assert presence.silent(1000.0) == []
    assert presence.silent(1002.0) == []


@pytest.fixture
def lines():
    found = Lifelines("127.0.0.1")
    yield found
    found.close()


def heard_of(lines: Lifelines):
    """What the driver is told, as it comes."""
    told: list[Severed] = []
    some = threading.Event()

    def tell(item: Severed) -> None:
        told.append(item)
        some.set()

    lines.start(tell)
    return told, some


def connect(anchor: Anchor, hello: str) -> socket.socket:
    line = socket.create_connection((anchor.address, anchor.port), timeout=100)
    line.sendall(hello.encode())
    return line


def test_the_end_of_an_agent_is_known_at_once(lines, until):
    told, some = heard_of(lines)
    line = connect(lines.anchor, f"{lines.anchor.secret} node-1")
    until(lambda: lines.holds("node-1"), 100, "the line to be known")
    line.send(b".")
    line.close()
    assert some.wait(100)
    assert told == [Severed(node="node-1")]
    assert not lines.holds("node-1")


def test_who_does_not_know_the_secret_is_nobody(lines, until):
    """Neither a wrong secret nor a second line of the same name says anything about a node."""
    told, _ = heard_of(lines)
    line = connect(lines.anchor, f"{lines.anchor.secret} node-1")
    until(lambda: lines.holds("node-1"), 100, "the line to be known")
    for hello in (f"{'0' * 64} node-1", f"{'0' * 64} node-2", f"{lines.anchor.secret} node-1", "GET / HTTP/1.1"):
        other = connect(lines.anchor, hello)
        assert other.recv(1) == b""
        other.close()
    assert lines.holds("node-1")
    assert not lines.holds("node-2")
    assert told == []
    line.close()


def test_an_agent_hears_that_the_driver_lets_go(lines, until):
    """And its end proves to the driver that it is gone."""
    told, some = heard_of(lines)
    ended = threading.Event()
    lifeline.Line(lines.anchor, "node-1", ended.set)
    until(lambda: lines.holds("node-1"), 100, "the line to be known")
    assert not ended.is_set()
    lines.let_go("node-1")
    assert ended.wait(100)
    assert some.wait(100)
    assert told == [Severed(node="node-1")]


def test_an_agent_hears_that_the_driver_is_gone(until):
    lines = Lifelines("127.0.0.1")
    lines.start(lambda _: None)
    ended = threading.Event()
    lifeline.Line(lines.anchor, "node-1", ended.set)
    until(lambda: lines.holds("node-1"), 100, "the line to be known")
    lines.close()
    assert ended.wait(100)


def test_an_idle_line_shows_that_it_is_alive(lines, until, monkeypatch):
    """Proxies close what is idle."""
    monkeypatch.setattr(lifeline, "_LIVELY_SECONDS", 0.01)
    server = socket.create_server(("127.0.0.1", 0))
    anchor = Anchor(address="127.0.0.1", port=server.getsockname()[1], secret="0")
    ended = threading.Event()
    lifeline.Line(anchor, "node-1", ended.set)
    line, _ = server.accept()
    line.settimeout(100)
    data = b""
    while data.count(b".") < 2:
        data += line.recv(16)
    assert data.startswith(b"0 node-1.")
    line.close()
    server.close()
    assert ended.wait(100)


def test_an_agent_that_cannot_connect_goes_on(lines):
    """Nothing follows from a line that was never there."""
    ended = threading.Event()
    anchor = Anchor(address="127.0.0.1", port=lines.anchor.port, secret="0")
    lines.close()
    lifeline.Line(anchor, "node-1", ended.set)
    threads = [thread for thread in threading.enumerate() if thread.name == "raylaunch-lifeline"]
    for thread in threads:
        thread.join(10)
    assert not ended.is_set()
