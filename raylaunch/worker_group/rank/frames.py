"""Sends a message together with large buffers, which are neither copied nor pickled on the way.

A frame is the number of its parts, their lengths, and the parts. The first is a pickled message of `messages`; what the
others are, it says. Both ends are processes of one run, and know its secret: so what comes is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

Buffer = bytes | bytearray | memoryview

_COUNT = struct.Struct("!I")
_MOST_AT_ONCE = 512
"""Buffers of one system call: Linux takes 1024 (IOV_MAX)."""


def send(sock: socket.socket, message: Any, parts: Sequence[Buffer] = ()) -> None:
    """Send a message and its parts. Raises OSError."""
    views = [memoryview(pickle.dumps(message)), *(memoryview(part).cast("B") for part in parts)]
    header = _COUNT.pack(len(views)) + struct.pack(f"!{len(views)}Q", *(view.nbytes for view in views))
    pending = [memoryview(header), *(view for view in views if view.nbytes)]
    while pending:
        sent = sock.sendmsg(pending[:_MOST_AT_ONCE])
        while pending and sent >= pending[0].nbytes:
            sent -= pending.pop(0).nbytes
        if sent:
            pending[0] = pending[0][sent:]


def receive(sock: socket.socket) -> tuple[Any, list[bytearray]]:
    """Wait for a message, and return it with its parts. Raises EOFError at the end, and OSError."""
    (count,) = _COUNT.unpack(_exactly(sock, _COUNT.size))
    lengths = struct.unpack(f"!{count}Q", _exactly(sock, 8 * count))
    message, *parts = [_exactly(sock, length) for length in lengths]
    return pickle.loads(message), parts  # noqa: S301


def _exactly(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
