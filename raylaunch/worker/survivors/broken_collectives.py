"""Ends what this process waits for in a collective whose peer is gone, so that its main thread can go on.

gloo has no abort (pytorch#130345). It waits on sockets of this process, which any thread may shut down: the waiting
thread then gets an error within milliseconds, as if all peers had died. So the sockets that torch opens for a process
group are remembered. A listening one must stay: gloo ends the process if that is shut down. NCCL has an abort.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from raylaunch.worker import torch_internals


class GroupSockets:
    """The sockets of this process's groups: all that were opened while torch made the groups."""

    def __init__(self) -> None:
        #: Inodes by descriptor.
        self._known: dict[int, int] = {}
        #: For each group that is being made, the inodes of sockets that were there before.
        self._openings: list[set[int]] = []

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Remember the sockets that are opened in this block, in which a group is made."""
        before = set(_sockets().values())
        self._openings.append(before)
        try:
            yield
        finally:
            self._openings.remove(before)
            self._known |= {fd: inode for fd, inode in _sockets().items() if inode not in before}

    def shut_down(self, store_port: int) -> None:
        """Shut down the connections of all groups, even of groups that are being made, and to their store.

        `store_port`: the port of the attempt's store, whose clients wait for ranks that are gone as well.
        """
        found = _sockets()
        before: set[int] = set.intersection(*self._openings) if self._openings else set(found.values())
        self._known = {fd: inode for fd, inode in self._known.items() if found.get(fd) == inode}
        for fd, inode in found.items():
            with contextlib.suppress(OSError):
                _shut_down(fd, inode, store_port, is_of_group=fd in self._known or inode not in before)


def _shut_down(fd: int, inode: int, store_port: int, *, is_of_group: bool) -> None:
    """Shut down a connection. Raises OSError where it is none: a listening socket, or one that is closed by now."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if os.fstat(sock.fileno()).st_ino != inode or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if is_of_group or sock.getpeername()[1] == store_port:
            sock.getpeername()
            sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Return the inodes of all sockets of this process by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def break_collectives(sockets: GroupSockets) -> None:
    """End every collective of this process that is waiting, with an error where it is called. For any thread.

    NCCL comes first: some of the sockets are its own, and their end would be an error that torch handles for a minute.
    Raises RuntimeError where NCCL cannot be aborted.
    """
    if torch_internals.has_nccl():
        torch_internals.abort_process_groups()
    port = os.environ.get("MASTER_PORT", "")
    sockets.shut_down(int(port) if port.isdecimal() else 0)
