"""What clients of a run may ask, with a driver that is pretended, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from raylaunch.cluster.control import control_server
from raylaunch.cluster.control.control_client import ControlClient, ControlError
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlRequest,
    DrainNode,
    GetStacks,
    ListLogs,
    LogsRead,
    ReadLogs,
    RefusedError,
    StacksCollected,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.core.failures.stacks import Stack
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan
from raylaunch.node.protocol.acceptor import SecretAddress

SPAN = LogSpan(rank=3, stream="stdout", start=0, end=7)
ARBITRARY = bytes(range(256)) + b"\n{]\xff"


class Driver:
    """Answers as a driver would."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []
        self.repeats = 1

    def answer(self, request: ControlRequest) -> object:
        self.asked.append(request)
        match request:
            case StopRun():
                return Accepted()
            case ReadLogs():
                block = LogBlock(rank=3, stream="stdout", start=0, data=ARBITRARY * self.repeats)
                return LogsRead(blocks=(block,), rest=(SPAN,))
            case GetStacks(ranks=ranks):
                stacks = (Stack(rank=7, state="S", text="/data/\udcff.py"),) if 7 in ranks else ()
                return StacksCollected(attempt=1, groups=(), stacks=stacks)
            case DrainNode():
                raise RefusedError("there is no other host", "add one")
            case _:
                raise KeyError("no such thing")


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(driver: Driver) -> Iterator[ControlServer]:
    found = ControlServer("127.0.0.1", driver.answer)
    found.start()
    yield found
    found.close()


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    found = ControlClient(server.secret_address)
    yield found
    found.close()


def connect(address: SecretAddress, words: bytes) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=100)
    with contextlib.suppress(ConnectionError):
        connection.sendall(words)
    return connection


def request(server: ControlServer, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return a request of somebody who knows the secret, unless `headers` have another one."""
    lines = {"Authorization": f"Bearer {server.secret}", "Content-Length": str(len(body)), **headers}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{text}\r\n".encode() + body


def answered(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def test_what_is_asked_is_answered(driver, client):
    """One thing after the other, by one connection. The bytes of workers arrive as they are."""
    assert client.ask(StopRun(at_once=True)) == Accepted()
    found = client.ask(ReadLogs(attempt=2, spans=(SPAN,)))
    assert (found.blocks[0].data, found.rest) == (ARBITRARY, (SPAN,))
    assert driver.asked == [StopRun(at_once=True), ReadLogs(attempt=2, spans=(SPAN,))]


def test_an_error_is_told_to_the_client(client):
    """And what is refused. The connection goes on, or another one is made."""
    with pytest.raises(RefusedError, match="there is no other host") as refused:
        client.ask(DrainNode(node="node-1"))
    assert refused.value.hint == "add one"
    with pytest.raises(RefusedError, match="KeyError: 'no such thing'"):
        list(client.ask(ListLogs(query=LogQuery(attempt=1, streams=("stdout",)))))
    assert client.ask(StopRun()) == Accepted()


def test_a_path_that_is_no_text(client):
    """JSON has only text: it is shown as well as possible."""
    found = client.ask(GetStacks(ranks=(7,)))
    assert found.stacks[0].text == "/data/?.py"


@pytest.mark.parametrize("words", [b"x\r\n", b"\xff\x00\r\n", b"GET /\r\n", b"\x16\x03\x01\x02\n", b"x" * 1_000_000])
def test_garbage_is_refused(driver, server, client, words):
    """Nothing that strangers send is taken for a request, and others are served as before."""
    with connect(server.secret_address, words) as stranger:
        with contextlib.suppress(OSError):  # it is refused already
            stranger.shutdown(socket.SHUT_WR)
        found = answered(stranger)
    assert b"HTTP/1.1 200" not in found
    assert b"HTTP/1.0 200" not in found
    assert client.ask(StopRun()) == Accepted()
    assert driver.asked == [StopRun()]


@pytest.mark.parametrize("words", ["", "Bearer", "Bearer ", "Bearer " + "0" * 64, "Basic x", "Bearer \xe9"])
def test_a_wrong_secret(driver, server, words):
    """It is told what is missing, and nothing of the run."""
    for text in (
        request(server, "/v1/stop", Authorization=words),
        request(server, "/v1/none", Authorization=words),
        request(server, "/", Authorization=words),
    ):
        with connect(server.secret_address, text) as stranger:
            found = answered(stranger)
        assert found.startswith(b"HTTP/1.1 401 ")
        assert found.endswith(b'{"why":"`Authorization: Bearer` and the secret of this run are missing","hint":""}\n')
    assert driver.asked == []
    with pytest.raises(ControlError, match="does not answer as the driver of this run"):
        ControlClient(replace(server.secret_address, secret="0" * 64))


def test_a_thousand_connections_keep_nobody_out(driver, server, monkeypatch, until):
    """Each says half of what it should say, and stays. Only the newest have threads."""
    monkeypatch.setattr("raylaunch.cluster.control.control_server._Client.timeout", 1000.0)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(server.secret_address, b"GET / HTTP/1.1\r\nAuthoriz"))
        client = ControlClient(server.secret_address)
        assert client.ask(StopRun()) == Accepted()
        client.close()
        until(lambda: threading.active_count() <= before + control_server.MOST_STRANGERS, 100, "threads to end")


def test_a_silent_stranger_is_closed(server, monkeypatch):
    """After some seconds."""
    monkeypatch.setattr("raylaunch.cluster.control.control_server._Client.timeout", 0.05)
    with connect(server.secret_address, b"GET / HT") as stranger:
        assert answered(stranger) == b""


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/none", b"", 404),
        ("/v1", b"", 404),
        ("/v1/stop", b"{", 400),
        ("/v1/stop", b"[]", 400),
        ("/v1/stop", b'{"at_once": 5}', 400),
        ("/v1/stop", b"\xff", 400),
        ("/v1/stop", b"[" * 100_000, 400),
        ("/v1/logs", b"", 400),
        ("/v1/logs/read", b'{"attempt": 1, "spans": [5]}', 400),
    ],
)
def test_what_is_no_request(driver, server, path, body, code):
    """Somebody who knows the secret is told what is wrong with it."""
    with connect(server.secret_address, request(server, path, body)) as other:
        found = answered(other)
    assert found.startswith(f"HTTP/1.1 {code} ".encode())
    assert json.loads(found.partition(b"\r\n\r\n")[2])["why"]
    assert driver.asked == []


@pytest.mark.parametrize("length", ["1001", "-1", "1e3", "x"])
def test_a_request_is_bounded(driver, server, monkeypatch, length):
    """It does not fill the memory."""
    monkeypatch.setattr(control_server, "MOST_BYTES", 1000)
    text = request(server, "/v1/stop", **{"Content-Length": length})
    with connect(server.secret_address, text) as other:
        assert answered(other).startswith(b"HTTP/1.1 4")
    assert driver.asked == []


def test_nothing_is_changed_by_get(driver, server):
    """As HTTP has it. What only looks may be asked by it, with fields in the address."""
    text = request(server, "/v1/stacks?ranks=0", Connection="close").replace(b"POST", b"GET", 1)
    with connect(server.secret_address, text.replace(b"stacks?ranks=0", b"stop")) as other:
        assert answered(other).startswith(b"HTTP/1.1 404 ")
    assert driver.asked == []
    with connect(server.secret_address, text.replace(b"?ranks=0", b"?no=1")) as other:
        assert b'{"attempt":1,"groups":[],"stacks":[]}\n' in answered(other)
    assert driver.asked == [GetStacks()]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(driver, server):
    """A person needs no other program."""
    where = server.secret_address
    asked = ["curl", "-sf", "-H", f"Authorization: Bearer {where.secret}", "-d", '{"by": "ada", "at_once": true}']
    done = subprocess.run([*asked, f"http://{where.host}:{where.port}/v1/stop"], capture_output=True, check=True)
    assert json.loads(done.stdout)["phase"] == "running"
    assert driver.asked == [StopRun(by="ada", at_once=True)]


def test_a_slow_client_is_dropped_and_keeps_nobody_waiting(driver, server, client, monkeypatch, until):
    """It reads nothing of what it is sent."""
    monkeypatch.setattr(control_server, "SLOW_SECONDS", 2.0)
    driver.repeats = 100_000
    assert client.ask(StopRun()) == Accepted()
    before = threading.active_count()
    with connect(server.secret_address, request(server, "/v1/logs/read", b'{"attempt": 1, "spans": []}')):
        until(lambda: len(driver.asked) == 2, 100, "the request")
        assert client.ask(StopRun()) == Accepted()
        until(lambda: threading.active_count() <= before, 100, "it to be dropped")


def test_fields_of_another_version(driver, server):
    """Those that are not known are left out, and missing ones have their defaults."""
    text = request(server, "/v1/stop", b'{"grace": 600}', Connection="close")
    with connect(server.secret_address, text) as other:
        assert answered(other).startswith(b"HTTP/1.1 200 ")
    assert driver.asked == [StopRun()]


def test_clients_that_stay_keep_no_other_one_out(server, client, monkeypatch):
    """The one that has asked nothing for longest is closed. It does not take that for the end of the driver."""
    monkeypatch.setattr(control_server, "MOST_CLIENTS", 2)
    assert client.ask(StopRun()) == Accepted()
    quiet, other = (ControlClient(server.secret_address) for _ in range(2))
    with pytest.raises(ControlError, match="has closed the connection") as caught:
        client.ask(StopRun())
    assert not caught.value.is_gone
    with connect(server.secret_address, request(server, "/v1/stop", **{"Content-Length": "9"})):  # it never ends
        last = ControlClient(server.secret_address)
        assert last.ask(StopRun()) == Accepted()
    for line in (quiet, other, last):
        line.close()


def test_the_head_of_a_request_is_bounded(driver, server):
    """Before anybody knows who sends it."""
    many = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(90))
    for headers in (many, b"X: " + b"x" * 60_000 + b"\r\n"):
        with connect(server.secret_address, b"POST /v1/stop HTTP/1.1\r\n" + headers + b"\r\n") as stranger:
            found = answered(stranger)  # nothing, if the connection was reset while there was more to read
        assert b" 431 " in found or not found
    assert driver.asked == []


def test_a_driver_that_is_gone(server, client):
    """Who is connected is told, and who connects too."""
    server.close()
    for ask in (lambda: client.ask(StopRun()), lambda: ControlClient(server.secret_address)):
        with pytest.raises(ControlError) as caught:
            ask()
        assert caught.value.is_gone


def test_an_answer_that_breaks_off(driver, server):
    """The driver is killed while it answers: what has come so far is not all."""
    server.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = SecretAddress(host="127.0.0.1", port=other.getsockname()[1], secret="")

        def serve() -> None:
            line, _ = other.accept()
            other.close()
            with line:
                line.recv(1000)
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                line.recv(1000)
                line.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n{"attempt": 1')

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ControlError) as caught:
            ControlClient(address).ask(StopRun())
    assert caught.value.is_gone


def test_the_end_waits_for_those_who_read_logs(server, client, until):
    """And not for those who only look on, nor for long."""
    client.ask(StopRun())
    server.await_clients(1000.0, reading_logs=True)
    client.ask(ReadLogs(attempt=1, spans=()))
    began = time.monotonic()
    server.await_clients(0.05, reading_logs=True)
    assert time.monotonic() - began >= 0.05
    client.close()
    server.await_clients(1000.0)
