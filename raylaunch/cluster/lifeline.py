"""One idle TCP connection from each agent to the driver, whose end tells either side that the other is gone.

A kernel closes the connections of a process that ends, however it ends, and the other side knows within a millisecond;
of an actor on a host that died Ray tells after seconds. A cut network closes nothing. An agent that cannot connect goes
without: then the lease and Ray's own word have to do.

It is also how the driver gets rid of a node that Ray has given up but that may still be alive: it lets go of its end,
the agent ends its node, and that is seen by the end of the line, which proves it.
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
_LIVELY_SECONDS = 60.0
"""Something is sent as often, for proxies that close what is idle."""
_MOST_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Where the driver listens, and what it wants to hear first."""

    address: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Severed:
    """The process of the node's agent is gone."""

    node: str


class Lifelines:
    """The driver's end of all of them."""

    def __init__(self, address: str) -> None:
        """Listens at this address of the driver's machine and no other. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        host, port = self._server.getsockname()[:2]
        self.anchor = Anchor(address=host, port=port, secret=secrets.token_hex(32))
        self._lines: dict[str, socket.socket] = {}
        self._tell: Callable[[Severed], None] = lambda _: None
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="raylaunch-lifelines")

    def start(self, tell: Callable[[Severed], None]) -> None:
        """Begin. `tell` is called from a thread."""
        self._tell = tell
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, "")
        self._selector.register(self._stopped, selectors.EVENT_READ, "")
        self._thread.start()

    def holds(self, node: str) -> bool:
        """Whether the agent's process is known to be there."""
        return node in self._lines

    def let_go(self, node: str) -> None:
        """Have the agent end its node. Its own end of the line follows, if it can hear us."""
        line = self._lines.get(node)
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of everybody."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join()
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
            return  # it has gone again
        except OSError:
            self._selector.unregister(self._server)  # no more file descriptors: further agents go without
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
            return  # a sign of life
        if data and (name := self._admitted(data)):
            self._selector.modify(line, selectors.EVENT_READ, name)
            self._lines[name] = line
            return
        self._selector.unregister(line)
        line.close()
        if node:
            del self._lines[node]
            self._tell(Severed(node=node))

    def _admitted(self, hello: bytes) -> str:
        """The node's name, if it knows the secret and is the first of that name."""
        secret, _, name = hello.decode(errors="replace").partition(" ")
        known = hmac.compare_digest(secret.encode(), self.anchor.secret.encode())
        return name if known and name not in self._lines else ""


class Line:
    """The agent's end of one."""

    def __init__(self, anchor: Anchor, node: str, ended: Callable[[], None]) -> None:
        """`ended` is called, from a thread, when the driver has let go or is gone."""
        self._anchor = anchor
        self._node = node
        self._ended = ended
        self._released = False
        self._line: socket.socket | None = None
        threading.Thread(target=self._hold, daemon=True, name="raylaunch-lifeline").start()

    def release(self) -> None:
        """Let go of it; nothing follows from that here."""
        self._released = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _hold(self) -> None:
        try:
            with socket.create_connection((self._anchor.address, self._anchor.port), timeout=_CONNECT_SECONDS) as line:
                self._line = line
                line.sendall(f"{self._anchor.secret} {self._node}".encode())
                line.settimeout(_LIVELY_SECONDS)
                while not self._released and not _closed(line):
                    line.send(b".")
        except (ConnectionResetError, BrokenPipeError):
            pass  # the driver's machine has no such connection any more
        except OSError:
            return  # no way to the driver: nothing follows from that
        if not self._released:
            self._ended()


def _closed(line: socket.socket) -> bool:
    """Wait for the driver's end; False: that took so long that something is to be sent."""
    try:
        return not line.recv(1)
    except TimeoutError:
        return False
