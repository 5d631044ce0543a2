"""A link: one idle TCP connection from each agent to the driver, whose end tells either side that the other is gone.

The kernel closes the connections of a process however it ends, and the other side knows within a millisecond. Ray tells
of an actor on a host that died after seconds. A cut network closes nothing. An agent that cannot connect has no link:
then the lease and Ray's own report must do.

By its link the driver also ends a node that Ray has given up but that may still be alive: it says so and shuts its end
down, the agent ends its node, and the end of the connection proves that it did. In a detached run an agent tells a
driver that was replaced so before it closes the link: such an end proves nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from raylaunch.core.newtypes import NodeId
from raylaunch.node.protocol import acceptor
from raylaunch.node.protocol.acceptor import Acceptor, SecretAddress

_CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 60.0
"""Seconds between two bytes that are sent, for proxies that close idle connections."""
_RETRY_SECONDS = (0.1, 0.3, 1.0, 3.0, 0.0)
"""The pause of an agent after each connection that the driver closed instead of admitting it."""
_MOST_BYTES = 256
_ADMITTED = b"+"
_KEEPALIVE = b"."
_END = b"!"
"""The driver tells the agent to end its node."""
_REPLACED = b"~"
"""The agent tells the driver that another one has taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link of a node is closed: the process of its agent is gone."""

    node: NodeId
    is_replaced: bool = False
    """The agent has closed it, since another driver has taken over."""


class LinkServer(Acceptor):
    """The driver's end of all links. Its methods may be called from any thread."""

    _watches = True

    def __init__(self, address: str) -> None:
        """Listen at this address of the driver's machine only. Raises OSError."""
        super().__init__(acceptor.listen(address), thread="raylaunch-link-server")
        self._lines: dict[NodeId, socket.socket] = {}
        self._is_replaced = False
        self._tell: Callable[[LinkDown], None] = lambda _: None

    def start(self, tell: Callable[[LinkDown], None]) -> None:
        """Start the thread that serves the links, and calls `tell`."""
        self._tell = tell
        self._listen_in_thread()

    def is_up(self, node: NodeId) -> bool:
        """Return whether the node's link is up, so that its agent's process is known to be alive."""
        return node in self._lines

    def shut_down(self, node: NodeId) -> None:
        """Shut down the link, which makes the agent end its node. `LinkDown` follows, if the agent can be reached."""
        line = self._lines.get(node)
        if line is not None:
            with contextlib.suppress(OSError):
                line.send(_END)
                line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Stop the thread and close all links; the agents then end their nodes."""
        super().close()
        for line in self._lines.values():
            line.close()

    def _admit(self, line: socket.socket, name: str) -> bool:
        """Admit a node that has no link yet."""
        if name in self._lines:
            return False
        with contextlib.suppress(OSError):
            line.send(_ADMITTED)  # before any other thread can shut the link down
        self._lines[NodeId(name)] = line
        return True

    def _readable(self, line: socket.socket, name: str) -> bool:
        try:
            data = line.recv(_MOST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if data:
            self._is_replaced |= _REPLACED in data  # else keepalive bytes
            return True
        node = NodeId(name)
        del self._lines[node]
        self._tell(LinkDown(node=node, is_replaced=self._is_replaced))
        return False


class Link:
    """The agent's end of its link."""

    def __init__(
        self,
        address: SecretAddress,
        node: NodeId,
        ended: Callable[[], None],
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Connect, in a thread, which calls `ended` when the driver has shut the link down, and `gone` when it is gone.

        `gone` None: `ended` too. Neither is called where the driver cannot be reached, or never admits the connection:
        then there is no link.
        """
        self._address = address
        self._node = node
        self._ended = ended
        self._gone = gone or ended
        self._is_told = False
        self._released = False
        self._line: socket.socket | None = None
        threading.Thread(target=self._hold, daemon=True, name="raylaunch-link").start()

    def moved_to(self, address: SecretAddress | None) -> Link | None:
        """Close the link, and return one to another driver; None: it has no address. One to that driver stays."""
        if address == self._address:  # that driver has begun this agent itself, and would believe it was replaced
            return self
        self._released = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(_REPLACED)
        self.release()
        return Link(address, self._node, self._ended, self._gone) if address is not None else None

    def release(self) -> None:
        """Close the link without a call."""
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
                (self._ended if self._is_told else self._gone)()
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
            if self._released:  # before the other thread knew the connection: the driver is not to hear of its end
                return False
            line.sendall(f"{self._address.secret} {self._node}\n".encode())
            line.settimeout(KEEPALIVE_SECONDS)
            while not self._released:
                try:
                    word = line.recv(1)
                    if not word:
                        break
                    admitted = True
                    self._is_told |= word == _END
                except TimeoutError:
                    line.send(_KEEPALIVE)
        return admitted
