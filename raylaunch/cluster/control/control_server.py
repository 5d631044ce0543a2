"""Serves those who know the secret of a run over HTTP: each connection has a thread, which answers one request at a
time.

Anybody in the network can connect. Connections that have not shown the secret are `MOST_STRANGERS` at most, each for
`HELLO_SECONDS` without a word. A further one closes the oldest, so they never keep out a client that knows the secret:
it shows that at once, and connects again if it was closed. In the same way a client that knows the secret takes the
place of the one that has asked nothing for longest, once there are `MOST_CLIENTS`.

What a client does not read stays in its own thread, which waits for it and for nobody else: the driver never waits for
a client while the run lasts. A client that takes nothing for `SLOW_SECONDS` is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, get_args
from urllib.parse import parse_qsl, urlsplit

import msgspec

from raylaunch.cluster.control.control_messages import (
    ControlRequest,
    GetStacks,
    GetState,
    ListLogs,
    ReadLogs,
    RefusedError,
)
from raylaunch.cluster.driver.observer import described
from raylaunch.node.protocol.acceptor import SecretAddress

Handler = Callable[[ControlRequest], object]
"""Answers a request. It is called in the threads of clients, by several at a time."""
MOST_STRANGERS = 64
"""Connections that have not shown the secret. Each further one closes the oldest."""
HELLO_SECONDS = 5.0
"""How long a stranger may be silent."""
MOST_HEAD_BYTES = 16 * 1024
"""The longest head of a request, which is read before it is known whether the client knows the secret."""
MOST_CLIENTS = 64
"""Clients that know the secret. Each further one closes the one that has asked nothing for longest."""
MOST_BYTES = 64 * 1024 * 1024
"""The longest request: one for logs names parts of the files of all ranks."""
SLOW_SECONDS = 30.0
"""How long a client may take to read what it is sent, or to ask the next thing."""
_POLL_SECONDS = 0.02
_EXHAUSTED_SECONDS = 0.1
"""How long no connection is accepted after the machine had no file descriptor left."""
_KINDS = {kind.PATH: kind for kind in get_args(ControlRequest)}


class _Client(BaseHTTPRequestHandler):
    """One connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = HELLO_SECONDS
    server: ControlServer
    #: Whether it has asked for logs, and has done nothing but look at the run since.
    reads_logs = False

    def parse_request(self) -> bool:
        """Read the head of a request, of which Python's server would take 100 lines of 64 KiB each."""
        lines, head, line = self.rfile, b"", b"x"
        while line.strip() and len(head) <= MOST_HEAD_BYTES:
            line = lines.readline(MOST_HEAD_BYTES + 1)
            head += line
        if len(head) > MOST_HEAD_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False
        self.rfile = io.BytesIO(head)
        try:
            return super().parse_request()
        finally:
            self.rfile = lines

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._serve((GetState, GetStacks))

    def do_POST(self) -> None:
        """Answer a request."""
        self._serve(tuple(_KINDS.values()))

    def _serve(self, kinds: tuple[type[Any], ...]) -> None:
        words = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(words, f"Bearer {self.server.secret}".encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED, "`Authorization: Bearer` and the secret of this run are missing")
            return
        self.server.admit(self)
        if self.path == "/":
            self._respond(HTTPStatus.OK, {"requests": [*_KINDS]})
        else:
            self.connection.settimeout(SLOW_SECONDS)
            self._ask(kinds)

    def _ask(self, kinds: tuple[type[Any], ...]) -> None:
        path, query = urlsplit(self.path)[2:4]
        kind: Any = _KINDS.get(path)
        if kind not in kinds:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no request {self.command} {path}")
            return
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MOST_BYTES:
                self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has {MOST_BYTES} bytes at most")
                return
            text = self.rfile.read(length)
            fields = msgspec.json.decode(text) if text else dict(parse_qsl(query))
            request = msgspec.convert(fields, kind, strict=bool(text))
        except (ValueError, RecursionError) as error:  # also the errors of msgspec
            self._refuse(HTTPStatus.BAD_REQUEST, f"this is no request `{path}`: {error}")
            return
        is_look = isinstance(request, GetState)
        self.reads_logs = isinstance(request, ListLogs | ReadLogs) or (self.reads_logs and is_look)
        try:
            self._respond(HTTPStatus.OK, self.server.answer(request))
        except RefusedError as refused:
            self._refuse(HTTPStatus.CONFLICT, str(refused), refused.hint)
        except OSError:
            raise  # the client is gone, or too slow
        except Exception as error:  # noqa: BLE001
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, described(error))

    def _refuse(self, status: HTTPStatus, why: str, hint: str = "") -> None:
        self._respond(status, {"why": why, "hint": hint})

    def _respond(self, status: HTTPStatus, content: object) -> None:
        body = _encoded(content) + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status not in (HTTPStatus.OK, HTTPStatus.CONFLICT, HTTPStatus.INTERNAL_SERVER_ERROR):
            self.send_header("Connection", "close")  # the rest of the request may not have been read
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return what strangers are told of the server."""
        return "raylaunch"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class ControlServer(ThreadingTCPServer):
    """The driver's end of all control connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    timeout = None

    def __init__(self, address: str, answer: Handler) -> None:
        """Listen at a free port of this address of the driver's machine only. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Client)
        self.answer = answer
        self.secret = secrets.token_hex(32)
        #: From the oldest to the newest, and clients from the one that has asked nothing for longest.
        self._strangers: dict[socket.socket, None] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def secret_address(self) -> SecretAddress:
        """Where it listens, and the secret."""
        host, port = self.server_address[:2]
        return SecretAddress(host=str(host), port=port, secret=self.secret)

    def start(self) -> None:
        """Start the thread that accepts connections."""
        threading.Thread(target=self._listen, daemon=True, name="raylaunch-control").start()

    def _listen(self) -> None:
        while not self._is_closed:
            self.handle_request()
        self.server_close()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._is_closed = True
        with self._lock:
            lines = [self.socket, *self._strangers, *self._clients]
        for line in lines:
            _shut_down(line)  # which wakes the threads that wait for it

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If no descriptor is left, the oldest stranger gives way. Raises OSError."""
        try:
            return super().get_request()
        except OSError:
            self._drop_stranger()
            time.sleep(_EXHAUSTED_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        with self._lock:
            is_full = len(self._strangers) >= MOST_STRANGERS
            self._strangers[request] = None
        if is_full:
            self._drop_stranger()
        super().process_request(request, client_address)

    def _drop_stranger(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                _shut_down(oldest)

    def admit(self, client: _Client) -> None:
        """Take a client that knows the secret, which has asked something."""
        with self._lock:
            self._strangers.pop(client.connection, None)
            self._clients.pop(client.connection, None)
            if len(self._clients) >= MOST_CLIENTS:
                oldest = next(iter(self._clients))
                del self._clients[oldest]
                _shut_down(oldest)
            self._clients[client.connection] = client

    def shutdown_request(self, request: Any) -> None:
        """Close a connection at its end."""
        with self._lock:
            self._strangers.pop(request, None)
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Leave it at that: a client is gone, or too slow, or there is no thread for it."""

    def await_clients(self, seconds: float, *, reading_logs: bool = False) -> None:
        """Wait until clients that look on have seen the end of the run and left, for `seconds` at most.

        `reading_logs`: only those that read logs.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                awaited = [client for client in self._clients.values() if client.reads_logs or not reading_logs]
            if not awaited:
                return
            time.sleep(_POLL_SECONDS)


def _encoded(content: object) -> bytes:
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:  # there is a path that is no UTF-8
        return json.dumps(msgspec.to_builtins(content), ensure_ascii=False).encode(errors="replace")


def _shut_down(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
