"""A link: one idle TCP connection from each agent to the driver, whose end tells either side that the other is gone.

The kernel closes the connections of a process however it ends, and the other side knows within a millisecond. Ray tells
of an actor on a host that died after seconds. A cut network closes nothing. An agent that cannot connect has no link:
then the lease and Ray's own report must do.

By its link the driver also ends a node that Ray has given up but that may still be alive: it shuts its end down, the
agent ends its node, and the end of the connection proves that it did.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raylaunch.core.newtypes import NO_NODE, NodeId

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
KEEPALIVE_SECONDS = 60.0
"""Seconds between two bytes that are sent, for proxies that close idle connections."""
_RETRY_SECONDS = (0.1, 0.3, 1.0, 3.0, 0.0)
"""The pause of an agent after each connection that the driver closed instead of admitting it."""
HELLO_SECONDS = 5.0
"""How long a connection may take to say hello: the secret, a space, the name of the node and a newline."""
_MOST_BYTES = 256
"""The length of the longest hello."""
MOST_PER_ADDRESS = 16
MOST_UNAUTHENTICATED = 128
"""Connections that have not said hello yet: those of one address, and all. Each further one closes the oldest."""
_PAUSE_SECONDS = 0.5
"""How long no connection is accepted after the machine had no file descriptor or memory left."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ADMITTED = b"+"
_KEEPALIVE = b"."


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Where the driver listens, and the secret that a connection must begin with."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link of a node is closed: the process of its agent is gone."""

    node: NodeId


@dataclass(slots=True, kw_only=True)
class _Hello:
    """What an unauthenticated connection has sent, and the time.monotonic() by which it must be complete."""

    address: str
    deadline: float
    data: bytes = b""


class LinkServer:
    """The driver's end of all links. Its methods may be called from any thread.

    Anybody in the network can connect. Connections without the secret cost the driver `MOST_UNAUTHENTICATED`
    descriptors at most, each for `HELLO_SECONDS`, and never keep an agent out: agents say hello at once, so the oldest
    connection is the one to close, and an agent that was closed tries again.
    """

    def __init__(self, address: str) -> None:
        """Listen at this address of the driver's machine only. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        host, port = self._server.getsockname()[:2]
        self.address = LinkAddress(host=host, port=port, secret=secrets.token_hex(32))
        self._lines: dict[NodeId, socket.socket] = {}
        #: From the oldest to the newest.
        self._unauthenticated: dict[socket.socket, _Hello] = {}
        #: A spare descriptor. If no other is left, it is closed, so that a connection can be accepted and then closed.
        #: None: it could not be opened again.
        self._spare: int | None = _spare_descriptor()
        #: When to accept connections again, after the machine had no resources. None: they are accepted now.
        self._resume_at: float | None = None
        self._tell: Callable[[LinkDown], None] = lambda _: None
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="raylaunch-link-server")

    def start(self, tell: Callable[[LinkDown], None]) -> None:
        """Start the thread that serves the links, and calls `tell`."""
        self._tell = tell
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, "")
        self._selector.register(self._stopped, selectors.EVENT_READ, "")
        self._thread.start()

    def is_up(self, node: NodeId) -> bool:
        """Return whether the node's link is up, so that its agent's process is known to be alive."""
        return node in self._lines

    def shut_down(self, node: NodeId) -> None:
        """Shut down the link, which makes the agent end its node. `LinkDown` follows, if the agent can be reached."""
        line = self._lines.get(node)
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Stop the thread and close all links; the agents then end their nodes."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        for sock in (self._server, self._stopped, *self._lines.values(), *self._unauthenticated):
            sock.close()
        self._selector.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(self._seconds_left()):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._stopped:
                    return
                if sock is self._server:
                    self._accept()
                elif key.data:
                    self._read(sock, key.data)
                elif sock in self._unauthenticated:  # it may just have been closed for a newer one
                    self._read_hello(sock)
            self._check_deadlines(time.monotonic())

    # Unauthenticated connections.

    def _seconds_left(self) -> float | None:
        """Return the seconds until `_check_deadlines` has something to do; None: it has nothing to do."""
        times = [hello.deadline for hello in self._unauthenticated.values()][:1]
        if self._resume_at is not None:
            times.append(self._resume_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_deadlines(self, now: float) -> None:
        for line in [line for line, hello in self._unauthenticated.items() if hello.deadline <= now]:
            self._drop(line)
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._spare = _spare_descriptor() if self._spare is None else self._spare
            self._selector.register(self._server, selectors.EVENT_READ, "")

    def _accept(self) -> None:
        try:
            line, peer = self._server.accept()
        except OSError as error:  # other errors say that the connection is closed already
            if error.errno in _EXHAUSTED:
                self._make_room()
            return
        line.setblocking(False)
        self._limit(peer[0])
        self._unauthenticated[line] = _Hello(address=peer[0], deadline=time.monotonic() + HELLO_SECONDS)
        self._selector.register(line, selectors.EVENT_READ, "")
        self._read_hello(line)

    def _limit(self, address: str) -> None:
        """Close a connection if one more from this address would be too many."""
        same = [line for line, hello in self._unauthenticated.items() if hello.address == address]
        if len(same) >= MOST_PER_ADDRESS:
            self._drop(same[0])
        elif len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
            self._drop(next(iter(self._unauthenticated)))

    def _make_room(self) -> None:
        """Close a connection, since no descriptor is left: the oldest that has not said hello, or else the new one.

        Otherwise the new one would wait in the backlog, and this thread would never sleep.
        """
        if self._unauthenticated:
            self._drop(next(iter(self._unauthenticated)))
        elif not self._refuse():
            self._selector.unregister(self._server)
            self._resume_at = time.monotonic() + _PAUSE_SECONDS

    def _refuse(self) -> bool:
        """Close the new connection with the help of the spare descriptor. False: that is not possible."""
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):  # something else is lacking, or another thread has taken the descriptor
            self._server.accept()[0].close()
            self._spare = _spare_descriptor()
        return self._spare is not None

    def _read_hello(self, line: socket.socket) -> None:
        hello = self._unauthenticated[line]
        try:
            data = line.recv(_MOST_BYTES - len(hello.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        hello.data += data
        text, end, _ = hello.data.partition(b"\n")
        if end and (node := self._admitted(text)):
            with contextlib.suppress(OSError):
                line.send(_ADMITTED)  # before any other thread can shut the link down
            del self._unauthenticated[line]
            self._selector.modify(line, selectors.EVENT_READ, node)
            self._lines[node] = line
        elif end or not data or len(hello.data) == _MOST_BYTES:
            self._drop(line)

    def _admitted(self, hello: bytes) -> NodeId:
        """Return the node if the secret is right and the node has no link yet, else `NO_NODE`."""
        secret, _, node = hello.decode(errors="replace").partition(" ")
        known = hmac.compare_digest(secret.encode(), self.address.secret.encode())
        return NodeId(node) if known and node not in self._lines else NO_NODE

    def _drop(self, line: socket.socket) -> None:
        del self._unauthenticated[line]
        self._selector.unregister(line)
        line.close()

    # Links.

    def _read(self, line: socket.socket, node: NodeId) -> None:
        try:
            data = line.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            return  # a keepalive byte
        self._selector.unregister(line)
        line.close()
        del self._lines[node]
        self._tell(LinkDown(node=node))


def _spare_descriptor() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class Link:
    """The agent's end of its link."""

    def __init__(self, address: LinkAddress, node: NodeId, ended: Callable[[], None]) -> None:
        """Connect, in a thread, which calls `ended` when the driver has shut the link down or is gone.

        It is not called where the driver cannot be reached, or never admits the connection: then there is no link.
        """
        self._address = address
        self._node = node
        self._ended = ended
        self._released = False
        self._line: socket.socket | None = None
        threading.Thread(target=self._hold, daemon=True, name="raylaunch-link").start()

    def release(self) -> None:
        """Close the link without calling `ended`."""
        self._released = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _hold(self) -> None:
        for pause in _RETRY_SECONDS:
            try:
                admitted = self._hold_once()
            except OSError:
                return  # the driver cannot be reached
            if self._released:
                return
            if admitted:
                self._ended()
                return
            time.sleep(pause)

    def _hold_once(self) -> bool:
        """Connect, and wait until the driver closes the connection. Return whether it had admitted it."""
        admitted = False
        with (
            socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_SECONDS) as line,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),  # the driver's host does not know it any more
        ):
            self._line = line
            line.sendall(f"{self._address.secret} {self._node}\n".encode())
            line.settimeout(KEEPALIVE_SECONDS)
            while not self._released:
                try:
                    if not line.recv(1):
                        break
                    admitted = True
                except TimeoutError:
                    line.send(_KEEPALIVE)
        return admitted
