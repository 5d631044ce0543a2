"""Connects a worker that can stay to its supervisor: the worker says so, and learns of the next attempt.

A message is one packet of a Unix socket, in JSON. The supervisor sends a `Rejoin` when the next attempt begins, to one
worker of the node with the descriptors of the files in which it completes its last light commits. The worker says that
it can stay (`ready`), that it has left the attempt (`returned`), and that it has completed them (`completed`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from dataclasses import asdict, dataclass, field, replace

from raylaunch.worker import descriptors

ADDRESS_VARIABLE = "RAYLAUNCH_SURVIVORS"
"""In a worker's environment: the abstract name of the supervisor's socket (unix(7)), without its first byte."""
MESSAGE_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorWord:
    """What a worker tells the supervisor of its node."""

    word: str
    """`ready`, `returned` or `completed`."""
    attempt: int
    """The one that it runs in (`ready`), or that it has been told to take part in."""
    seconds: int = 0
    """How long it may take to leave that attempt (`ready`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """The supervisor tells a survivor to leave its attempt, and to take part in this one."""

    attempt: int
    env: dict[str, str] = field(repr=False)
    """The variables that are not as in the attempt before."""
    removed: list[str]
    """Those that are not there any more."""
    title: str
    """What `ps` shows of the worker from now on."""
    stdout: str
    """The file for its output from now on; `""`: as before."""
    stderr: str
    newest: int = 0
    """After how many steps the newest commit is that is worth completing; 0: not known."""

    def after(self, former: Rejoin) -> Rejoin:
        """Return this order with the changes of the former one too, which may not have been carried out."""
        env = {name: value for name, value in former.env.items() if name not in self.removed} | self.env
        return replace(self, env=env, removed=sorted({*former.removed, *self.removed} - env.keys()))


def encode(message: SurvivorWord | Rejoin) -> bytes:
    """Return the packet of a message."""
    return json.dumps(asdict(message)).encode()


def receive_rejoin(link: socket.socket) -> tuple[Rejoin, int]:
    """Wait for the supervisor's message, and return it with the descriptor that came with it, -1 for none.

    Raises OSError, and EOFError where the supervisor has closed the connection.
    """
    data, fds, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 1)
    for fd in fds:
        os.set_inheritable(fd, False)  # Python 3.11 and 3.12 ignore the flags of recv_fds
    if not data:
        raise EOFError
    return Rejoin(**json.loads(data)), fds[0] if fds else -1


class OwnSocket:
    """A socket that is used as long as its descriptor is of this socket. The script may have closed it.

    The number may be of a socket or a file of the script then, which is neither written to, read from nor closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._identity = descriptors.identity(sock.fileno())

    def get(self) -> socket.socket:
        """Return the socket. Raises OSError where it is not there any more."""
        if not descriptors.is_still(self._sock.fileno(), self._identity):
            self._sock.detach()
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._sock

    def close(self) -> None:
        """Close the socket, also for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            sock = self.get()
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def is_known() -> bool:
    """Return whether this process has a supervisor that knows of survivors."""
    return bool(os.environ.get(ADDRESS_VARIABLE))


def connect() -> socket.socket | None:
    """Return a connection to the supervisor; None: there is none, as outside a launch."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        return None
    return sock
