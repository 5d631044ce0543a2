"""Sends pickled messages over a socket pair, of which each end is held by one process of ours.

A message that is too long for one packet travels in a memory file whose descriptor is sent instead. Workers connect by
themselves to what `listen` returns, and speak in other ways.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import struct
from typing import Any

_INLINE = 32_000
"""Bytes; a packet must fit the socket's send buffer (net.core.wmem_default, about 200 kB on Linux)."""
_MAX_FDS = 2
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of SO_PEERCRED (unix(7)): process, user and group."""


def listen() -> tuple[socket.socket, str]:
    """Return a socket that workers of this node can connect to, and its abstract name without its first byte.

    Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel chooses an abstract name (unix(7), autobind)
    listener.listen(_BACKLOG)
    return listener, listener.getsockname()[1:].decode()


def accept(listener: socket.socket) -> tuple[socket.socket, int] | None:
    """Accept a connection, and return it with the process id at its other end. None: it is gone, or another user's.

    Those are closed, since they could use up all descriptors.
    """
    with contextlib.suppress(OSError):
        sock = listener.accept()[0]
        pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user == os.geteuid():
            return sock, pid
        sock.close()
    return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. SOCK_SEQPACKET keeps messages whole and tells when the other end is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: Any, *, fd: int | None = None) -> None:
    """Send one message, with a file descriptor if given.

    Raises ConnectionError where the other end is closed, and OSError where this process can open no more files.
    """
    data = pickle.dumps(message)
    fds = [] if fd is None else [fd]
    if len(data) <= _INLINE:
        socket.send_fds(sock, [b"i" + data], fds)
        return
    body = memory_file("raylaunch-message", data)
    try:
        socket.send_fds(sock, [b"m"], [body, *fds])
    finally:
        os.close(body)


def receive(sock: socket.socket) -> tuple[Any, int | None]:
    """Receive one message and the file descriptor that came with it. Raises EOFError where the other end is closed.

    Raises OSError where a file came with it, and this process can open no more files.
    """
    packet, fds, flags, _ = socket.recv_fds(sock, _INLINE * 2, _MAX_FDS)
    try:
        if not packet:
            raise EOFError
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        data = read_all(fds.pop(0)) if packet[:1] == b"m" else packet[1:]
        message = pickle.loads(data)  # noqa: S301
        return message, fds.pop(0) if fds else None
    finally:
        for unexpected in fds:
            os.close(unexpected)


def is_readable(sock: socket.socket) -> bool:
    """Return whether `receive` would not block: there is a message, or the other end is closed."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def memory_file(name: str, data: bytes = b"") -> int:
    """Return the descriptor of an anonymous file in memory (memfd) that holds the data and is closed on exec."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def read_all(fd: int) -> bytes:
    """Return the contents of a memory file, and close it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()
