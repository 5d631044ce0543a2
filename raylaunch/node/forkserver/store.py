"""The stores of a fork server: one TCPStore process for each attempt, where its workers rendezvous.

Its socket listens before the process is forked. So the port is known at once, and a client that connects before
TCPStore runs waits in the backlog instead of being refused.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from raylaunch.node.linux import command_line, dns, interfaces, limits, processes
from raylaunch.node.linux.processes import fork
from raylaunch.node.protocol import node_status
from raylaunch.node.protocol.forkserver_messages import StartStore

_BACKLOG = 4096
_LEAVING_SECONDS = 1.0
_MOST_LOSSES = 10
"""Processes that one store may lose. What kills one after the other would kill the next one too."""
_DIED = "the store of attempt {} died and was opened again: workers that use their connection to it get an error"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a store listens, what workers are told as MASTER_ADDR, and why that is not what the job asks for."""

    told: str
    listens: str
    why: str = ""


def meeting_place(own: str, wanted: str, *, several_nodes: bool) -> StoreAddress:
    """Return the job's `master_addr` (`wanted`) if this node has it and others reach it there, else the node's own.

    Where there are several nodes, workers are told an IP address even if the job gives a name: on another node the name
    may resolve to something else, or to nothing.
    """
    if not wanted:
        return StoreAddress(told=own, listens=own)
    found = interfaces.resolve(wanted)
    ours = [address for address in found if interfaces.is_local(address)]
    reachable = not several_nodes or interfaces.is_loopback(own)
    usable = [address for address in ours if reachable or not interfaces.is_loopback(address)]
    if usable:
        return StoreAddress(told=usable[0] if several_nodes else wanted, listens=usable[0])
    why = "means nothing there" if not found else "is not an address of that node"
    why = "means another machine on each node" if ours else why
    return StoreAddress(
        told=own,
        listens=own,
        why=f"MASTER_ADDR is {own}, the address of the node with rank 0: `master_addr: {wanted}` {why}",
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address only: TCPStore has no authentication. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def listen_soon(address: str, port: int) -> socket.socket:
    """Like `listen`, but wait for a port that the store of another agent on this machine may be about to leave."""
    deadline = time.monotonic() + _LEAVING_SECONDS
    while True:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(_LEAVING_SECONDS / 100)


def serve(address: str, port: int, listening_fd: int) -> None:
    """Serve until killed. `TCPStore` takes the socket over (`master_listen_fd`, torch >= 2.1).

    It never closes silent connections of strangers, and refuses workers if they take all descriptors. So it may have
    as many as the system allows: by default 524,288 in place of 1,024.

    Where torch is not imported yet, its import waits for the first client, since there may never be one.
    """
    command_line.set_helper_title("store")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if "torch" not in sys.modules:
        select.select([listening_fd], [], [])

        dns.disable_reverse_lookups()
    from torch.distributed import TCPStore  # noqa: PLC0415

    options = {"is_master": True, "wait_for_workers": False}
    while True:
        fd = os.dup(listening_fd)  # where TCPStore fails, it closes this one
        try:
            with dns.stderr_discarded():
                store = TCPStore(address, port, master_listen_fd=fd, **options)
            break
        except NotImplementedError:  # torch 2.6: its server with libuv, the default, takes no socket over, and says so
            options["use_libuv"] = False
    os.close(listening_fd)
    while store.port:
        signal.pause()


def run(parent: int, address: str, port: int, listening_fd: int, *, forked: bool) -> None:
    """In the process of a store: serve, in a fresh interpreter unless it was forked from one that could be used."""
    if not forked:
        os.set_inheritable(listening_fd, True)
        os.execv(sys.executable, [sys.executable, __file__, str(parent), address, str(port), str(listening_fd)])
    serve(address, port, listening_fd)


@dataclass(frozen=True, slots=True)
class _StoreProcess:
    pid: int
    order: StartStore
    """With the port that was found."""
    losses: int
    """Processes of this store that have died before."""


class StoreTable:
    """Store processes by attempt. `run` is what a store's process does, given address, port and listening socket."""

    def __init__(self, run: Callable[[str, int, int], int]) -> None:
        self._run = run
        self._stores: dict[int, _StoreProcess] = {}

    def pids(self) -> set[int]:
        """Return the process ids of stores that were neither closed nor reaped."""
        return {found.pid for found in self._stores.values()}

    def open(self, order: StartStore, losses: int = 0) -> node_status.StoreOpened:
        """Bind the attempt's store and fork its process, in place of one that the attempt may have already."""
        self._close([number for number in self._stores if number == order.attempt])
        place = meeting_place(order.address, order.master_addr, several_nodes=order.several_nodes)
        listening = None
        try:
            listening = (listen_soon if order.fixed else listen)(place.listens, order.port)
            port = listening.getsockname()[1]
            pid = fork(partial(self._serve, place.listens, port, listening))
            listening.close()
        except OSError as error:
            if listening is not None:
                listening.close()
            why = limits.explained(error, "the fork server")
            return node_status.StoreOpened(attempt=order.attempt, port=0, address=place.listens, why=why)
        self._stores[order.attempt] = _StoreProcess(pid, replace(order, port=port), losses)
        return node_status.StoreOpened(attempt=order.attempt, port=port, address=place.told, why=place.why)

    def _serve(self, address: str, port: int, listening: socket.socket) -> int:
        return self._run(address, port, listening.detach())

    def reaped(self, pids: Collection[int]) -> Iterator[node_status.StoreOpened]:
        """Handle the end of these processes: reopen each store that died, at its port, and yield the result.

        Workers that have not connected yet do not notice. Connected workers get an error from torch.
        """
        for attempt, died in [*self._stores.items()]:
            if died.pid not in pids:
                continue
            del self._stores[attempt]
            if died.losses < _MOST_LOSSES:
                opened = self.open(died.order, died.losses + 1)
                yield replace(opened, why=_DIED.format(attempt)) if opened.port else opened
            else:
                why = "its process dies again and again"
                yield node_status.StoreOpened(attempt=attempt, port=0, address=died.order.address, why=why)

    def close_before(self, attempt: int) -> None:
        """Kill the stores of earlier attempts."""
        self._close([number for number in self._stores if number < attempt])

    def close_all(self) -> None:
        """Kill the processes of all stores."""
        self._close([*self._stores])

    def vacate(self, attempt: int) -> None:
        """Kill the stores of attempts up to this one, and wait until they have left their port."""
        for pid in self._close([number for number in self._stores if number <= attempt]):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _close(self, attempts: list[int]) -> list[int]:
        pids = [self._stores.pop(attempt).pid for attempt in attempts]
        for pid in pids:
            processes.kill_with_group(pid)
        return pids


def main() -> None:
    """The program of a store that could not be forked: `store.py PARENT ADDRESS PORT FD`."""
    parent, address, port, fd = sys.argv[1:]
    processes.signal_on_parent_death(signal.SIGKILL, int(parent))
    serve(address, int(port), int(fd))


if __name__ == "__main__":
    main()
