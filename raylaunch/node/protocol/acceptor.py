"""Accepts connections that begin with a secret, and bounds what others cost.

Anybody in the network can connect. Connections without the secret cost the process `MOST_UNAUTHENTICATED` descriptors
at most, each for `HELLO_SECONDS`. The oldest is dropped first, so they never keep out a client that knows the secret:
it says hello at once, and connects again if it was dropped.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

_CLOSE_SECONDS = 2.0
HELLO_SECONDS = 5.0
"""How long a connection may take to say hello: the secret, a space, a name and a newline."""
_MOST_BYTES = 256
"""The length of the longest hello."""
MOST_PER_ADDRESS = 16
MOST_UNAUTHENTICATED = 128
"""Connections that have not said hello yet: from one address, and in all. Each further one closes the oldest."""
_PAUSE_SECONDS = 0.5
"""How long no connection is accepted after the machine had no file descriptor or memory left."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretAddress:
    """Where a server listens, and the secret that a connection must begin with."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(slots=True, kw_only=True)
class _Hello:
    """What an unauthenticated connection has sent, and the time.monotonic() by which it must be complete."""

    address: str
    deadline: float
    data: bytes = b""


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of this address of the machine only. Raises OSError."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


class Acceptor(ABC):
    """Listens, and admits connections, in a thread of its own. `close` may be called from any thread."""

    def __init__(self, server: socket.socket, *, thread: str, secret: str = "") -> None:
        """`server`: see `listen`. `thread`: the name of the thread. `secret`: "": a new one. Raises OSError."""
        self._server = server
        host, port = server.getsockname()[:2]
        self.address = SecretAddress(host=host, port=port, secret=secret or secrets.token_hex(32))
        #: From the oldest to the newest.
        self._unauthenticated: dict[socket.socket, _Hello] = {}
        #: When to accept connections again, after the machine had no resources. None: they are accepted now.
        self._resume_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, daemon=True, name=thread)

    @abstractmethod
    def _admit(self, line: socket.socket, name: str) -> bool:
        """Take a connection that has said hello with the secret and this name. False: it is to be closed."""

    def _readable(self, line: socket.socket, name: str) -> bool:
        """Read from an admitted connection that `_watches`. False: it is at its end, and is to be closed."""
        raise NotImplementedError

    _watches = False
    """Whether the thread goes on reading from admitted connections, with `_readable`."""

    def _listen_in_thread(self) -> None:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, "")
        self._selector.register(self._stopped, selectors.EVENT_READ, "")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close all connections that were not admitted."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        for sock in (self._server, self._stopped, *self._unauthenticated):
            sock.close()
        self._selector.close()

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
                    self._watch(sock, key.data)
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
        """Close the oldest connection that has not said hello, since no descriptor is left; or accept none for a while.

        The new one waits until then. Without the pause, this thread would never sleep.
        """
        if self._unauthenticated:
            self._drop(next(iter(self._unauthenticated)))
        else:
            self._selector.unregister(self._server)
            self._resume_at = time.monotonic() + _PAUSE_SECONDS

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
        if end and (name := self._known_name(text)):
            del self._unauthenticated[line]
            self._selector.unregister(line)
            if not self._admit(line, name):
                line.close()
            elif self._watches:
                self._selector.register(line, selectors.EVENT_READ, name)
        elif end or not data or len(hello.data) == _MOST_BYTES:
            self._drop(line)

    def _known_name(self, hello: bytes) -> str:
        """Return the name in a hello if its secret is right, else `""`."""
        secret, _, name = hello.decode(errors="replace").partition(" ")
        return name if hmac.compare_digest(secret.encode(), self.address.secret.encode()) else ""

    def _drop(self, line: socket.socket) -> None:
        del self._unauthenticated[line]
        self._selector.unregister(line)
        line.close()

    def _watch(self, line: socket.socket, name: str) -> None:
        if not self._readable(line, name):
            self._selector.unregister(line)
            line.close()
