"""Sends pickled messages over a socket pair, of which each end is held by one process of ours.

A message that is too long for one packet travels in a memory file whose descriptor is sent instead. `peer_of` says
whose the other end of any Unix socket is, as the kernel knows it.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from typing import Any

_INLINE = 32_000
"""Bytes; a packet must fit the socket's send buffer (net.core.wmem_default, about 200 kB on Linux)."""
_MAX_FDS = 2
_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of SO_PEERCRED (unix(7)): process, user and group."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user of the process at the other end of a Unix socket. Raises OSError."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def peer_is_same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as this process's user."""
    return peer_of(sock)[1] == os.geteuid()


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
