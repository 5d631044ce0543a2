"""What clients of a run may ask, with a driver that is pretended, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from raylaunch.cluster.control import control_client, control_server
from raylaunch.cluster.control.control_client import ControlClient, ControlError, RefusedError
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlAnswer,
    ControlRequest,
    ListLogs,
    ReadLogs,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan
from raylaunch.node.protocol.acceptor import SecretAddress

SPAN = LogSpan(rank=3, stream="stdout", start=0, end=7)
ARBITRARY = bytes(range(256)) + b"\n{]\xff"


class Driver:
    """Answers as a driver would."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []
        self.blocks = 1

    def answers(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        self.asked.append(request)
        match request:
            case StopRun():
                yield Accepted()
            case ReadLogs():
                for number in range(self.blocks):
                    yield LogBlock(rank=3, stream="stdout", start=number, data=ARBITRARY)
                yield LogBlock(rank=3, stream="stdout", start=9, data=b"")
            case _:
                raise KeyError("no such thing")


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(driver: Driver) -> Iterator[ControlServer]:
    found = ControlServer("127.0.0.1", driver.answers)
    found.start()
    yield found
    found.close()


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    found = ControlClient(server.address)
    yield found
    found.close()


def connect(address: SecretAddress, words: bytes) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=100)
    with contextlib.suppress(ConnectionError):
        connection.sendall(words)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes the connection, and sends nothing before."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_what_is_asked_is_answered(driver, client):
    """One thing after the other, by one connection. The bytes of workers arrive as they are."""
    assert list(client.ask(StopRun(at_once=True))) == [Accepted()]
    first, last = client.ask(ReadLogs(attempt=2, spans=(SPAN,)))
    assert (first.data, last.data, first.rank) == (ARBITRARY, b"", 3)
    assert driver.asked == [StopRun(at_once=True), ReadLogs(attempt=2, spans=(SPAN,))]


def test_an_error_is_told_to_the_client(client):
    """And the connection goes on."""
    with pytest.raises(RefusedError, match="KeyError: 'no such thing'"):
        list(client.ask(ListLogs(query=LogQuery(attempt=1, streams=("stdout",)))))
    assert list(client.ask(StopRun())) == [Accepted()]


@pytest.mark.parametrize(
    "words",
    [
        b"\n",
        b"x\n",
        b"0" * 64 + b" client\n",
        b"0" * 64 + b"\n",
        b"\xff\x00\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 1_000_000,
    ],
)
def test_strangers_are_refused(driver, server, client, words):
    """Nothing that they send is taken for a request, and others are served as before."""
    with connect(server.address, words) as stranger:
        assert is_closed(stranger)
    assert list(client.ask(StopRun())) == [Accepted()]
    assert driver.asked == [StopRun()]


def test_a_thousand_connections_keep_nobody_out(driver, server):
    """Each says half of what it should say, and stays. Those who are admitted have a thread each."""
    before = {*threading.enumerate()}
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(server.address, server.address.secret[:20].encode()))
        client = ControlClient(server.address)
        assert list(client.ask(StopRun())) == [Accepted()]
        client.close()
    started = [thread.name for thread in threading.enumerate() if thread not in before]
    assert len([name for name in started if name.startswith("raylaunch-")]) <= 1


@pytest.mark.parametrize(
    "request_",
    [
        *(b"{\n", b"[]\n", b"5\n", b'{"is": "No"}\n', b'{"is": "StopRun", "at_once": 5}\n', b"[" * 100_000 + b"\n"),
        *(b'{"is": "ListLogs"}\n', b'{"is": "ReadLogs", "attempt": 1, "spans": [5]}\n', b'{"is": "Accepted"}\n'),
        b'{"is": "StopRun", "data": 9999999}\n',
    ],
)
def test_what_is_no_request_ends_the_connection(driver, server, request_):
    """Even of somebody who knows the secret."""
    with connect(server.address, f"{server.address.secret} x\n".encode()) as other:
        assert other.recv(1) == b"+"
        other.sendall(request_)
        other.shutdown(socket.SHUT_WR)
        assert is_closed(other)
    assert driver.asked == []


def test_a_request_without_an_end_is_bounded(server, monkeypatch):
    """It does not fill the memory."""
    monkeypatch.setattr("raylaunch.cluster.control.control_frames.MOST_BYTES", 1000)
    with connect(server.address, f"{server.address.secret} x\n".encode()) as other:
        assert other.recv(1) == b"+"
        with contextlib.suppress(ConnectionError):
            other.sendall(b"x" * 1_000_000)
        assert is_closed(other)


def test_a_slow_client_is_dropped_and_keeps_nobody_waiting(driver, server, client, monkeypatch, until):
    """It reads nothing of what it is sent."""
    monkeypatch.setattr(control_server, "SLOW_SECONDS", 0.05)
    driver.blocks = 100_000
    with connect(server.address, f"{server.address.secret} x\n".encode()) as slow:
        assert slow.recv(1) == b"+"
        slow.sendall(json.dumps({"is": "ReadLogs", "attempt": 1, "spans": []}).encode() + b"\n")
        assert list(client.ask(StopRun())) == [Accepted()]
        until(lambda: "raylaunch-x" not in {thread.name for thread in threading.enumerate()}, 100, "it to be dropped")


def test_fields_of_another_version(driver, server):
    """Those that are not known are left out, and missing ones have their defaults."""
    with connect(server.address, f"{server.address.secret} x\n".encode()) as other:
        assert other.recv(1) == b"+"
        other.sendall(b'{"is": "StopRun", "grace": 600}\n')
        assert other.recv(100).startswith(b'{"is": "Accepted"')
    assert driver.asked == [StopRun()]


def test_too_many_clients(server, client, monkeypatch):
    """Further ones are told that the driver is busy, which is not gone, until one leaves."""
    monkeypatch.setattr(control_server, "MOST_CLIENTS", 1)
    monkeypatch.setattr(control_client, "RETRY_SECONDS", (0.0,))
    assert list(client.ask(StopRun())) == [Accepted()]
    with pytest.raises(ControlError, match="no more at a time; try again") as caught:
        ControlClient(server.address)
    assert not caught.value.is_gone


def test_a_driver_that_is_gone(server, client):
    """Who is connected is told, and who connects too."""
    server.close()
    for ask in (lambda: list(client.ask(StopRun())), lambda: ControlClient(server.address)):
        with pytest.raises(ControlError) as caught:
            ask()
        assert caught.value.is_gone


def test_the_end_waits_for_those_who_read_logs(server, client, until):
    """And not for those who only look on, nor for long."""
    list(client.ask(StopRun()))
    server.await_clients(1000.0, reading_logs=True)
    list(client.ask(ReadLogs(attempt=1, spans=())))
    began = time.monotonic()
    server.await_clients(0.05, reading_logs=True)
    assert time.monotonic() - began >= 0.05
    client.close()
    server.await_clients(1000.0)
