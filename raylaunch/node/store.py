"""The rendezvous store of one attempt: a process that holds torch's TCPStore server and does nothing else.

Its socket is bound and listening before the process exists, so its port can be told at once, and a client that comes
early waits in the backlog instead of being refused.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[: not sys.flags.safe_path] = [__file__.rsplit("/", 3)[0]]

import errno
import select
import signal
import socket
import time
from dataclasses import dataclass

from raylaunch.node import interfaces, nameless
from raylaunch.worker import boot

_BACKLOG = 4096
_LEAVING_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """What the workers are told, where the store listens, and why that is not where the job wants it."""

    told: str
    listens: str
    why: str = ""


def meeting_place(own: str, wanted: str, *, several_nodes: bool) -> MeetingPlace:
    """Where the job wants it, if that is this node and all others reach it there; else the node's own address.

    Other nodes are told a number even where the job gives a name, since it may mean something else there, or nothing.
    """
    if not wanted:
        return MeetingPlace(told=own, listens=own)
    found = interfaces.resolved(wanted)
    ours = [address for address in found if interfaces.is_ours(address)]
    reachable = not several_nodes or interfaces.is_loopback(own)
    usable = [address for address in ours if reachable or not interfaces.is_loopback(address)]
    if usable:
        return MeetingPlace(told=usable[0] if several_nodes else wanted, listens=usable[0])
    why = "means nothing there" if not found else "is not an address of that node"
    why = "means another machine on each node" if ours else why
    return MeetingPlace(
        told=own,
        listens=own,
        why=f"MASTER_ADDR is {own}, the address of the node with rank 0: `master_addr: {wanted}` {why}",
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket at this one address: TCPStore asks nobody who he is, so it must not be found elsewhere."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def listen_soon(address: str, port: int) -> socket.socket:
    """The same, where the store of another agent on this machine may be about to leave the port."""
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

    Where nothing has imported torch yet, that waits for the first client: there may be none.
    """
    if "torch" not in sys.modules:
        select.select([listening_fd], [], [])

        nameless.ask_for_no_names()
    from torch.distributed import TCPStore  # noqa: PLC0415

    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening_fd)
    while store.port:
        signal.pause()


def main() -> None:
    """The program of a store that could not be forked: `store.py PARENT ADDRESS PORT FD`."""
    parent, address, port, fd = sys.argv[1:]
    boot.die_with_parent(int(parent))
    serve(address, int(port), int(fd))


if __name__ == "__main__":
    main()
