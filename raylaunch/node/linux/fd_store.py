"""The subreaper's store of file descriptors: what an agent puts there outlives the agent.

systemd's descriptor store does the same for a service (`sd_pid_notify_with_fds`). Each descriptor has a name. A message
is one packet: a name with a descriptor, which takes the place of one of the same name, or a name alone, whose
descriptor is closed. Nobody has to read a packet for its descriptor to stay open, so nothing is lost if the agent is
killed right after it has sent one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

_MESSAGE_BYTES = 256
_SEND_SECONDS = 2.0
"""How long the subreaper may take to read what was sent before. It may be stopped."""


class FdStore:
    """The subreaper's end of the store."""

    def __init__(self, fd: int) -> None:
        """`fd`: the socket that `FdStoreClient.connect` has returned."""
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)  # Python 3.11's `recv_fds` ignores its flags
        self.fds: dict[str, int] = {}

    def fileno(self) -> int:
        """Return the descriptor of the socket, which is readable when there is a packet."""
        return self._sock.fileno()

    def receive(self) -> None:
        """Take all packets that there are."""
        with contextlib.suppress(OSError):
            while (packet := socket.recv_fds(self._sock, _MESSAGE_BYTES, 1))[0]:
                name, fds = packet[0].decode(), packet[1]
                if (before := self.fds.pop(name, None)) is not None:
                    os.close(before)
                if fds:
                    self.fds[name] = fds[0]

    def close(self) -> None:
        """Close all descriptors."""
        self._sock.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class FdStoreClient:
    """The agent's end of the store, for any thread. A subreaper that takes the place of another gets all again."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        #: What is to be in the store. The descriptors belong to the callers.
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Return the end for a new subreaper. Call `send_all` when it runs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_SEND_SECONDS)
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = ours
        return theirs

    def send_all(self) -> None:
        """Put into a new store what was in the one before."""
        with self._lock, contextlib.suppress(OSError):
            for name, fd in self._fds.items():
                self._send(name, fd)

    def keep(self, name: str, fd: int) -> None:
        """Put a descriptor into the store; call `drop` before it is closed. Raises OSError where that is not possible.

        A subreaper that is gone is no error, since another one follows.
        """
        with self._lock:
            self._fds[name] = fd
            self._send(name, fd)

    def drop(self, name: str) -> None:
        """Remove a descriptor from the store, if it is there."""
        with self._lock, contextlib.suppress(OSError):
            if self._fds.pop(name, None) is not None:
                self._send(name)

    def drop_all(self) -> None:
        """Remove all descriptors: no other agent is to have anything of this one."""
        for name in [*self._fds]:
            self.drop(name)

    def _send(self, name: str, *fds: int) -> None:
        if self._sock is not None:
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._sock, [name.encode()], fds)

    def close(self) -> None:
        """Close the connection. The store stays as it is."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
