"""A link: one idle TCP connection from each agent to the driver, whose end tells either side that the other is gone.

The kernel closes the connections of a process however it ends, and the other side knows within a millisecond. Ray tells
of an actor on a host that died after seconds. A cut network closes nothing. An agent that cannot connect has no link:
then the lease and Ray's own report must do.

By its link the driver also ends a node that Ray has given up but that may still be alive: it shuts its end down, the
agent ends its node, and the end of the connection proves that it did.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
KEEPALIVE_SECONDS = 60.0
"""Seconds between two bytes that are sent, for proxies that close idle connections."""
_MOST_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Where the driver listens, and the secret that a connection must begin with."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link of a node is closed: the process of its agent is gone."""

    node: str


class LinkServer:
    """The driver's end of all links. Its methods may be called from any thread."""

    def __init__(self, address: str) -> None:
        """Listen at this address of the driver's machine only. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        host, port = self._server.getsockname()[:2]
        self.address = LinkAddress(host=host, port=port, secret=secrets.token_hex(32))
        self._lines: dict[str, socket.socket] = {}
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

    def is_up(self, node: str) -> bool:
        """Return whether the node's link is up, so that its agent's process is known to be alive."""
        return node in self._lines

    def shut_down(self, node: str) -> None:
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
        for sock in (self._server, self._stopped, *self._lines.values()):
            sock.close()
        self._selector.close()

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._stopped:
                    return
                if sock is self._server:
                    self._accept()
                else:
                    self._read(sock, key.data)

    def _accept(self) -> None:
        try:
            line, _ = self._server.accept()
        except (BlockingIOError, ConnectionError):
            return  # it is closed already
        except OSError:
            self._selector.unregister(self._server)  # no more file descriptors: further agents have no link
            return
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, "")

    def _read(self, line: socket.socket, node: str) -> None:
        try:
            data = line.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and node:
            return  # a keepalive byte
        if data and (name := self._admitted(data)):
            self._selector.modify(line, selectors.EVENT_READ, name)
            self._lines[name] = line
            return
        self._selector.unregister(line)
        line.close()
        if node:
            del self._lines[node]
            self._tell(LinkDown(node=node))

    def _admitted(self, hello: bytes) -> str:
        """Return the node's name if the secret is right and the name is new, else `""`."""
        secret, _, name = hello.decode(errors="replace").partition(" ")
        known = hmac.compare_digest(secret.encode(), self.address.secret.encode())
        return name if known and name not in self._lines else ""


class Link:
    """The agent's end of its link."""

    def __init__(self, address: LinkAddress, node: str, ended: Callable[[], None]) -> None:
        """Connect, in a thread, which calls `ended` when the driver has shut the link down or is gone."""
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
        try:
            with socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_SECONDS) as line:
                self._line = line
                line.sendall(f"{self._address.secret} {self._node}".encode())
                line.settimeout(KEEPALIVE_SECONDS)
                while not self._released and not _closed(line):
                    line.send(b".")
        except (ConnectionResetError, BrokenPipeError):
            pass  # the driver's machine has no such connection any more
        except OSError:
            return  # the driver cannot be reached: there is no link
        if not self._released:
            self._ended()


def _closed(line: socket.socket) -> bool:
    """Wait until the driver closes the link. False: nothing happened, and a keepalive byte is due."""
    try:
        return not line.recv(1)
    except TimeoutError:
        return False
