"""Serves parts of commits on a connection that knows the secret: answers one request after the other.

The agent serves its node's parts (`part_server` in `cluster`), and the state keeper a killed agent's parts
(`orphaned_parts`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import abstractmethod

from raylaunch.core.machine.commits import HeldCommit
from raylaunch.node.protocol.acceptor import Acceptor
from raylaunch.node.state import part_transfer

MOST_CONNECTIONS = 32
"""Other agents that are served at a time. Those that are not try again."""


class PartService(Acceptor):
    """Serves each connection with the secret in a thread of its own. `close` may be called from any thread."""

    def __init__(self, server: socket.socket, *, secret: str = "") -> None:
        """`server` and `secret`: as in `Acceptor`. Raises OSError."""
        super().__init__(server, thread="raylaunch-part-server", secret=secret)
        self._lines: set[socket.socket] = set()
        self._is_closed = False

    @abstractmethod
    def _answer(self, line: socket.socket, kind: bytes, part: HeldCommit, size: int) -> None:
        """Answer a request, as `part_transfer.read_request` returns it. Raises OSError: the connection is closed."""

    def start(self) -> None:
        """Take connections from now on, in a thread of its own. Raises RuntimeError where there can be no thread."""
        self._listen_in_thread()

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_closed = True
        super().close()
        for line in [*self._lines]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _admit(self, line: socket.socket, name: str) -> bool:
        del name
        if len(self._lines) >= MOST_CONNECTIONS or self._is_closed:
            return False
        self._lines.add(line)
        try:
            threading.Thread(target=self._serve, args=(line,), daemon=True, name="raylaunch-part").start()
        except RuntimeError:  # "can't start new thread"
            self._lines.discard(line)
            return False
        return True

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                line.settimeout(part_transfer.TIMEOUT)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(part_transfer.ADMITTED)
                while (request := part_transfer.read_request(line)) is not None:
                    self._answer(line, *request)
        finally:
            self._lines.discard(line)
