"""The agent's lease, the driver's `node_timeout`, and the link between them, without Ray."""

from __future__ import annotations

import socket
import threading

import pytest

from raylaunch.cluster.agent import lease as leases
from raylaunch.cluster.agent import link
from raylaunch.cluster.agent.lease import Lease, report_interval
from raylaunch.cluster.agent.link import LinkAddress, LinkDown, LinkServer
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.worker.heartbeats.shared_page import lease_clock


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(leases, "lease_clock", found)
    return found


def in_seconds(times: list[int]) -> list[float]:
    return [ns / 1e9 for ns in times]


def test_a_lease_lasts_from_the_last_report_that_arrived(clock):
    """The first report renews it when it is sent, each later one when the next call proves that it arrived."""
    renewals: list[int] = []
    lease = Lease(10.0, renewals.append, lambda: None)
    lease.driver_called()
    assert renewals == []
    lease.report_sent()
    assert in_seconds(renewals) == [1009.0]
    clock.now = 1001.0
    lease.driver_called()
    clock.now = 1002.0
    lease.report_sent()  # it may never arrive
    assert in_seconds(renewals) == [1009.0, 1009.0]
    clock.now = 1003.0
    lease.driver_called()
    assert in_seconds(renewals)[-1] == 1011.0


def test_an_expired_lease_is_not_renewed(clock):
    """A call may have waited while the driver, or this process, was stopped: the workers may have ended by then."""
    renewals: list[int] = []
    lease = Lease(10.0, renewals.append, lambda: None)
    lease.report_sent()
    clock.now = 1008.0
    lease.driver_called()
    lease.report_sent()
    assert not lease.expired
    clock.now = 1009.0
    assert lease.expired
    lease.driver_called()
    assert in_seconds(renewals)[-1] == 1009.0


def test_the_process_ends_when_the_lease_expires():
    ended = threading.Event()
    renewals: list[int] = []
    lease = Lease(0.3, renewals.append, ended.set)
    lease.start()
    lease.report_sent()
    assert ended.wait(100)
    assert lease_clock() >= renewals[-1]


def test_a_lease_expires_while_the_machine_sleeps(clock):
    """Waiting with a timeout does not count the time that the machine sleeps, so the thread looks at the clock."""

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    waits, ended = threading.Event(), threading.Event()
    renewals: list[int] = []
    lease = Lease(3600.0, renewals.append, ended.set)
    lease.released = Waited()
    lease.start()
    lease.report_sent()
    assert waits.wait(100)
    clock.now += 3600.0
    assert ended.wait(100)
    lease.driver_called()
    assert in_seconds(renewals) == [1000.0 + 0.9 * 3600.0]


def test_the_process_ends_if_the_driver_never_calls(monkeypatch):
    monkeypatch.setattr(leases, "FIRST_CALL_SECONDS", 0.05)
    ended = threading.Event()
    Lease(5.0, lambda _: None, ended.set).start()
    assert ended.wait(100)


def test_closing_the_node_may_take_longer_than_the_lease(clock):
    lease = Lease(0.3, lambda _: None, lambda: None)
    lease.report_sent()
    lease.node_closing()
    clock.now += 5.0
    assert not lease.expired


def test_a_lease_expires_before_the_driver_takes_the_node_for_lost(clock):
    """Whatever the order of sending, arriving and calling."""
    timeout = 5.0
    renewals: list[int] = []
    registry = NodeRegistry(timeout, None)
    lease = Lease(timeout, renewals.append, lambda: None)
    for step, travel in enumerate([0.0, 0.4, 1.9, 0.0, 3.0, 0.2]):
        lease.report_sent()
        clock.now += travel
        if step == 0:
            registry.came_up("node-1", "host", clock.now)
        registry.heard("node-1", clock.now)
        lease.driver_called()
        assert renewals[-1] / 1e9 < clock.now + timeout
        assert registry.silent(renewals[-1] / 1e9) == []


def test_several_reports_fit_into_the_node_timeout():
    assert report_interval(5.0) == 1.0
    assert report_interval(60.0) == 1.0
    assert report_interval(1.5) == pytest.approx(0.3)


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


def connect(address: LinkAddress, hello: str) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=100)
    connection.sendall(hello.encode())
    return connection


def test_link_down_follows_the_end_of_an_agent(link_server, until):
    events, some = start_recording(link_server)
    connection = connect(link_server.address, f"{link_server.address.secret} node-1")
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    connection.send(b".")
    connection.close()
    assert some.wait(100)
    assert events == [LinkDown(node="node-1")]
    assert not link_server.is_up("node-1")


def test_a_connection_without_the_secret_is_refused(link_server, until):
    """So is a second connection with the same name. Neither counts as a link."""
    events, _ = start_recording(link_server)
    connection = connect(link_server.address, f"{link_server.address.secret} node-1")
    until(lambda: link_server.is_up("node-1"), 100, "the link to be known")
    for hello in (f"{'0' * 64} node-1", f"{'0' * 64} node-2", f"{link_server.address.secret} node-1", "GET / HTTP/1.1"):
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
    address = LinkAddress(host="127.0.0.1", port=server.getsockname()[1], secret="0")
    ended = threading.Event()
    link.Link(address, "node-1", ended.set)
    connection, _ = server.accept()
    connection.settimeout(100)
    data = b""
    while data.count(b".") < 2:
        data += connection.recv(16)
    assert data.startswith(b"0 node-1.")
    connection.close()
    server.close()
    assert ended.wait(100)


def test_an_agent_that_cannot_connect_runs_on(link_server):
    """Without a link, only the lease and Ray's report count."""
    ended = threading.Event()
    address = LinkAddress(host="127.0.0.1", port=link_server.address.port, secret="0")
    link_server.close()
    link.Link(address, "node-1", ended.set)
    threads = [thread for thread in threading.enumerate() if thread.name == "raylaunch-link"]
    for thread in threads:
        thread.join(10)
    assert not ended.is_set()
