"""Keeping torch from asking the DNS for the names of addresses.

TCPStore wants them for its messages: a worker asks as it joins, the store for each worker that comes, one after the
other, and /etc/hosts does not answer, since they ask for an IPv4 address in IPv6 form (torch 2.13, `socket.cpp`).
Where the DNS does not answer either, each waits 10 seconds, in every attempt. A process in which that failed for want
of an answer asks no more, nor do those that are forked from it. So it is made to fail once, at once, in the process
that workers and stores are forked from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from datetime import timedelta

from raylaunch.worker import boot

_ADDRESS = "127.83.84.79"
"""This machine, by an address that nobody has given a name."""
_SECONDS = 1.0


def ask_for_no_names() -> None:
    """To be called where torch is imported and no thread runs. Where it cannot be done, torch goes on asking."""
    if "torch.distributed" not in sys.modules:
        return
    with contextlib.suppress(Exception), _silence(), _no_answers():
        _ask()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Torch complains on stderr that it gets no name."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextlib.contextmanager
def _no_answers() -> Iterator[None]:
    """Questions of this thread to the DNS are not sent: the resolver's own count of attempts is 0 (`_res.retry`)."""
    libc = ctypes.CDLL(None)
    libc["__res_init"]()
    resolver = libc["__res_state"]
    resolver.restype = ctypes.POINTER(ctypes.c_int * 2)
    state = resolver().contents
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


def _ask() -> None:
    """Connect as a worker does. Where nobody answered the client's first word, it would wait and try again."""
    from torch.distributed import TCPStore  # noqa: PLC0415

    with socket.create_server((_ADDRESS, 0)) as server:
        me = os.getpid()
        child = os.fork()
        if child == 0:
            _answer(server, me)
        try:
            port, timeout = server.getsockname()[1], timedelta(seconds=_SECONDS)
            TCPStore(_ADDRESS, port, is_master=False, wait_for_workers=False, timeout=timeout)
        finally:
            os.waitpid(child, 0)


def _answer(server: socket.socket, parent: int) -> None:
    """Say what a store says to a client that comes: the number that it sends, which is its process id."""
    try:
        boot.die_with_parent(parent)
        server.settimeout(_SECONDS)
        client, _ = server.accept()
        client.settimeout(_SECONDS)
        client.sendall(struct.pack("=I", parent))
        while client.recv(4096):
            pass
    finally:
        os._exit(0)
