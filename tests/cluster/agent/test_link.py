"""The links between agents and the driver, without Ray, and what strangers can do to them."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from raylaunch.cluster.agent import link
from raylaunch.cluster.agent.link import LinkDown, LinkServer
from raylaunch.node.protocol import acceptor
from raylaunch.node.protocol.acceptor import SecretAddress


@pytest.fixture
def link_server():
    found = LinkServer("127.0.0.1")
    yield found
    found.close()


def start_recording(link_server: LinkServer):
    """Start the server; return the list of its events, and an event that is set with the first one."""
    events: list[LinkDown] = []
    some = threading.Event()

    def tell(item: LinkDown) -> None:
        events.append(item)
        some.set()

    link_server.start(tell)
    return events, some


def connect(address: SecretAddress, hello: str, source: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=100, source_address=(source, 0))
    connection.sendall(hello.encode())
    return connection


def test_link_down_follows_the_end_of_an_agent(link_server, until):
    events, some = start_recording(link_server)
    connection = connect(link_server.address, f"{link_server.address.secret} node-1\n")
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    connection.send(b".")
    connection.close()
    assert some.wait(100)
    assert events == [LinkDown(node="node-1")]
    assert not link_server.is_up("node-1")


def test_a_connection_without_the_secret_is_refused(link_server, until):
    """So is a second connection with the same name. Neither counts as a link."""
    events, _ = start_recording(link_server)
    connection = connect(link_server.address, f"{link_server.address.secret} node-1\n")
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    wrong = "0" * 64
    for hello in (f"{wrong} node-1\n", f"{wrong} node-2\n", f"{link_server.address.secret} node-1\n", "\n", "x" * 256):
        other = connect(link_server.address, hello)
        assert other.recv(1) == b""
        other.close()
    assert link_server.is_up("node-1")
    assert not link_server.is_up("node-2")
    assert events == []
    connection.close()


def test_an_agent_ends_when_its_link_is_shut_down(link_server, until):
    """`LinkDown` then proves to the driver that it is gone."""
    events, some = start_recording(link_server)
    ended = threading.Event()
    link.Link(link_server.address, "node-1", ended.set)
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    assert not ended.is_set()
    link_server.shut_down("node-1")
    assert ended.wait(100)
    assert some.wait(100)
    assert events == [LinkDown(node="node-1")]


def test_an_agent_ends_when_the_driver_is_gone(until):
    link_server = LinkServer("127.0.0.1")
    link_server.start(lambda _: None)
    ended = threading.Event()
    link.Link(link_server.address, "node-1", ended.set)
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    link_server.close()
    assert ended.wait(100)


def test_an_idle_link_sends_keepalive_bytes(link_server, until, monkeypatch):
    """Proxies close idle connections."""
    monkeypatch.setattr(link, "KEEPALIVE_SECONDS", 0.01)
    server = socket.create_server(("127.0.0.1", 0))
    address = SecretAddress(host="127.0.0.1", port=server.getsockname()[1], secret="0")
    ended = threading.Event()
    link.Link(address, "node-1", ended.set)
    connection, _ = server.accept()
    connection.settimeout(100)
    connection.send(b"+")
    data = b""
    while data.count(b".") < 2:
        data += connection.recv(16)
    assert data.startswith(b"0 node-1\n.")
    connection.close()
    server.close()
    assert ended.wait(100)


def test_an_agent_that_cannot_connect_runs_on(link_server):
    """Without a link, only the lease and Ray's report count."""
    ended = threading.Event()
    address = SecretAddress(host="127.0.0.1", port=link_server.address.port, secret="0")
    link_server.close()
    link.Link(address, "node-1", ended.set)
    threads = [thread for thread in threading.enumerate() if thread.name == "raylaunch-link"]
    for thread in threads:
        thread.join(100)
    assert not ended.is_set()


def test_an_agent_that_is_not_admitted_tries_again():
    """The driver closes the oldest of too many connections. That is no reason to end a node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()
        link.Link(SecretAddress(host="127.0.0.1", port=server.getsockname()[1], secret="0"), "node-1", ended.set)
        server.accept()[0].close()
        connection, _ = server.accept()
        assert not ended.is_set()
        connection.send(b"+")
        connection.close()
        assert ended.wait(100)


def test_a_hello_in_several_segments(link_server):
    start_recording(link_server)
    connection = connect(link_server.address, link_server.address.secret[:10])
    for part in (link_server.address.secret[10:], " node", "-1"):
        round_trip(link_server.address)
        connection.sendall(part.encode())
    round_trip(link_server.address)
    assert not link_server.is_up("node-1")
    connection.sendall(b"\n..")
    assert connection.recv(1) == b"+"
    connection.close()


def round_trip(address: SecretAddress) -> None:
    """Wait until the server has read what was sent before."""
    with connect(address, "\n") as other:
        assert other.recv(1) == b""


def test_connections_that_say_no_hello_are_closed(link_server, monkeypatch, until):
    """Also those that send a byte now and then. Links stay."""
    monkeypatch.setattr(acceptor, "HELLO_SECONDS", 0.05)
    start_recording(link_server)
    ended = threading.Event()
    with connect(link_server.address, "0") as stranger:
        link.Link(link_server.address, "node-1", ended.set)
        until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
        assert stranger.recv(1) == b""
    assert link_server.is_up("node-1")
    assert not ended.is_set()


def test_strangers_cannot_keep_agents_out(link_server, monkeypatch):
    """More than a number of silent connections of one address close the oldest of this address, and no other."""
    monkeypatch.setattr(acceptor, "HELLO_SECONDS", 1000.0)
    start_recording(link_server)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(connect(link_server.address, "", source="127.0.0.2"))
        strangers = [
            stack.enter_context(connect(link_server.address, "0")) for _ in range(acceptor.MOST_PER_ADDRESS + 3)
        ]
        assert [one.recv(1) for one in strangers[:3]] == [b""] * 3
        assert closed([other, *strangers[3:]]) == []
        agent = stack.enter_context(connect(link_server.address, f"{link_server.address.secret} node-1\n"))
        assert agent.recv(1) == b"+"


def test_strangers_of_many_addresses(link_server, monkeypatch):
    monkeypatch.setattr(acceptor, "HELLO_SECONDS", 1000.0)
    start_recording(link_server)
    number = acceptor.MOST_UNAUTHENTICATED + 1
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(connect(link_server.address, "0", source=f"127.0.1.{last}"))
            for last in range(1, number)
        ]
        assert closed(strangers) == []
        agent = stack.enter_context(connect(link_server.address, f"{link_server.address.secret} node-1\n"))
        assert agent.recv(1) == b"+"
        assert strangers[0].recv(1) == b""


def closed(connections: Sequence[socket.socket]) -> list[socket.socket]:
    """Return those that the server has closed by now. It sends nothing to them."""
    return select.select(connections, [], [], 0.0)[0]


SERVER = """
import resource, sys
from raylaunch.cluster.agent import link
from raylaunch.node.protocol import acceptor
from raylaunch.cluster.agent.link import LinkServer
acceptor.HELLO_SECONDS = 1000.0
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
server = LinkServer("127.0.0.1")
server.start(lambda down: print(down.node, flush=True))
print(server.address.port, server.address.secret, flush=True)
sys.stdin.read()
"""


def test_a_driver_without_descriptors():
    """Strangers make room for agents. If agents have all descriptors, another one waits until one of them ends."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port, secret = process.stdout.readline().split()
        address = SecretAddress(host="127.0.0.1", port=int(port), secret=secret)
        for last in range(1, 62):
            stack.enter_context(connect(address, "", source=f"127.0.1.{last}"))
        agents = [stack.enter_context(connect(address, f"{secret} {number}\n")) for number in range(32)]
        admitted = [agent for agent in agents if select.select([agent], [], [], 1.0)[0]]
        assert len(admitted) > 10
        further = agents[len(admitted)]
        assert admitted == agents[: len(admitted)]
        assert closed([further]) == []
        agents[5].close()
        assert process.stdout.readline() == "5\n"
        assert further.recv(1) == b"+"


class Exhausted(socket.socket):
    """A listening socket of a machine that cannot accept connections for a while, whatever a process closes."""

    failures = 2

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENFILE, "too many open files in system")
        return super().accept()


def test_the_listener_comes_back(monkeypatch):
    listening = Exhausted()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    monkeypatch.setattr(acceptor.socket, "create_server", lambda *_, **__: listening)
    server = LinkServer("127.0.0.1")
    server.start(lambda _: None)
    with connect(server.address, f"{server.address.secret} node-1\n") as agent:
        assert agent.recv(1) == b"+"
    assert listening.failures == 0
    server.close()


def test_an_agent_of_a_detached_run_tells_the_end_of_its_driver_from_its_own(link_server, until):
    """A driver that shuts the link down gives up the node; one that is gone is followed by another."""
    start_recording(link_server)
    ended, gone = threading.Event(), threading.Event()
    link.Link(link_server.address, "node-1", ended.set, gone.set)
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    link_server.shut_down("node-1")
    assert ended.wait(100)
    link.Link(link_server.address, "node-2", ended.clear, gone.set)
    until(lambda: link_server.is_up("node-2"), 100, "the link to be known")
    link_server.close()
    assert gone.wait(100)
    assert ended.is_set()


def test_a_driver_that_was_replaced_is_told_so(link_server, until):
    """Then the end of a link does not mean that the agent is gone."""
    events, some = start_recording(link_server)
    called = threading.Event()
    last = link.Link(link_server.address, "node-1", called.set, called.set)
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    other = LinkServer("127.0.0.1")
    with contextlib.closing(other):
        other.start(lambda _: None)
        last.moved_to(other.address)
        until(lambda: other.is_up("node-1"), 100, "the link to the other driver")
        assert some.wait(100)
        assert events == [LinkDown(node="node-1", is_replaced=True)]
        assert not called.is_set()


def test_a_driver_that_adopts_an_agent_that_it_has_begun_is_not_told_that_it_was_replaced(link_server, until):
    """The driver before it died before it had begun the agent. The link is to the driver in command: it stays."""
    events, _ = start_recording(link_server)
    called = threading.Event()
    begun = link.Link(link_server.address, "node-1", called.set, called.set)
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    assert begun.moved_to(link_server.address) is begun
    round_trip(link_server.address)
    assert link_server.is_up("node-1")
    assert events == []
    assert not called.is_set()


def test_a_link_that_moves_before_it_is_up_does_not_end_at_the_driver_before(link_server, monkeypatch):
    """That driver would take the end for that of the agent."""
    events, _ = start_recording(link_server)
    connecting, moved = threading.Event(), threading.Event()
    create_connection = socket.create_connection

    def late(*args, **kwargs):
        connection = create_connection(*args, **kwargs)
        connecting.set()
        assert moved.wait(100)
        return connection

    monkeypatch.setattr(link.socket, "create_connection", late)
    before = {*threading.enumerate()}
    first = link.Link(link_server.address, "node-1", lambda: None)
    assert connecting.wait(100)
    (thread,) = [one for one in {*threading.enumerate()} - before if one.name == "raylaunch-link"]
    assert first.moved_to(None) is None
    moved.set()
    thread.join(100)
    monkeypatch.undo()
    round_trip(link_server.address)
    assert events == []
