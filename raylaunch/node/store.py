"""The rendezvous store of one attempt: a process that holds torch's TCPStore server and does nothing else.

Its socket is bound and listening before the process exists, so its port can be told at once, and a client that comes
early waits in the backlog instead of being refused.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[: not sys.flags.safe_path] = [__file__.rsplit("/", 3)[0]]

import signal
import socket

from raylaunch.worker import boot

_BACKLOG = 4096


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket at the node's address; everywhere, where the address is not one of this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    everywhere = "::" if family == socket.AF_INET6 else ""
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError:
        return socket.create_server((everywhere, port), family=family, backlog=_BACKLOG)


def serve(address: str, port: int, listening_fd: int) -> None:
    """Serve until killed. `TCPStore` takes the socket over (`master_listen_fd`, torch >= 2.1)."""
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
