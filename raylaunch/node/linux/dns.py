"""Stops torch from looking up the host names of workers, which takes 10 seconds each where no DNS server answers.

TCPStore (torch 2.13, `torch/csrc/distributed/c10d/socket.cpp`) looks up names for its messages only: a client does so
as it connects, and the server for each client, one after the other. /etc/hosts does not help, because torch asks for
an IPv4 address in its IPv6 form. In a process in which one lookup failed with EAI_AGAIN, torch makes no others, and
neither do processes that are forked from it. So one lookup is made to fail at once in the process that workers and
stores are forked from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from datetime import timedelta

from raylaunch.node.linux import processes

_ADDRESS = "127.83.84.79"
"""A loopback address that no hosts file names."""
_TIMEOUT = 1.0


def disable_reverse_lookups() -> None:
    """Make the first lookup of this process fail. Does nothing where torch.distributed is not imported.

    Called while no thread runs. Where anything goes wrong, torch goes on looking up names.
    """
    if "torch.distributed" not in sys.modules:
        return
    with contextlib.suppress(Exception), stderr_discarded(), dns_queries_fail():
        connect_tcpstore_client()


@contextlib.contextmanager
def stderr_discarded() -> Iterator[None]:
    """Discard what torch writes to stderr about the lookup that failed."""
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
def dns_queries_fail() -> Iterator[None]:
    """Let DNS queries of this thread fail at once with EAI_AGAIN: glibc's resolver makes 0 attempts (`_res.retry`)."""
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


def connect_tcpstore_client() -> None:
    """Connect a TCPStore client, as a worker does, to a child process that answers as a TCPStore server does."""
    from torch.distributed import TCPStore  # noqa: PLC0415

    with socket.create_server((_ADDRESS, 0)) as listening:
        client_pid = os.getpid()
        child = os.fork()
        if child == 0:
            _answer_client(listening, client_pid)
        try:
            port, timeout = listening.getsockname()[1], timedelta(seconds=_TIMEOUT)
            TCPStore(_ADDRESS, port, is_master=False, wait_for_workers=False, timeout=timeout)
        finally:
            os.waitpid(child, 0)


def _answer_client(listening: socket.socket, parent: int) -> None:
    """Answer the ping of the client with the number that it sent, its process id; else it would wait and try again."""
    try:
        processes.signal_on_parent_death(signal.SIGKILL, parent)
        listening.settimeout(_TIMEOUT)
        client, _ = listening.accept()
        client.settimeout(_TIMEOUT)
        client.sendall(struct.pack("=I", parent))
        while client.recv(4096):
            pass
    finally:
        os._exit(0)
