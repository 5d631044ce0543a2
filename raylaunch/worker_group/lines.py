"""The connections of a group's ranks to the caller's process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Any

from raylaunch.node.protocol import acceptor
from raylaunch.node.protocol.acceptor import Acceptor
from raylaunch.worker_group.rank import frames
from raylaunch.worker_group.rank.frames import Buffer
from raylaunch.worker_group.rank.messages import GroupRank, RankHello
from raylaunch.worker_group.rank.serving import ADMITTED


class RankLine:
    """The connection of one rank in one attempt. One thread puts what it hears into the inbox; another sends."""

    def __init__(self, sock: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
        self._sock = sock
        self._inbox = inbox
        #: Messages with their parts; None: the last one was sent.
        self._outbox: queue.SimpleQueue[tuple[object, list[Buffer]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="raylaunch-group-rank").start()
        threading.Thread(target=self._send, daemon=True, name="raylaunch-group-send").start()

    def _listen(self) -> None:
        try:
            while True:
                message, parts = frames.receive(self._sock)
                self._inbox.put(Heard(line=self, message=message, parts=parts))
        except (OSError, EOFError):
            self._inbox.put(LineClosed(line=self))

    def send(self, message: object, parts: list[Buffer] | None = None) -> None:
        """Send a message, without waiting for a rank that does not read."""
        self._outbox.put((message, parts or []))

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the rank is gone, as the other thread says
            while (item := self._outbox.get()) is not None:
                frames.send(self._sock, *item)
                del item  # it may be large

    def close(self) -> None:
        """Close the connection, and end its threads."""
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A rank has sent a message."""

    line: RankLine
    message: Any
    parts: list[bytearray]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineClosed:
    """A rank is gone, or has left its attempt."""

    line: RankLine


class LineServer(Acceptor):
    """Admits ranks that know the secret of the group."""

    def __init__(self, address: str, inbox: queue.SimpleQueue[Any]) -> None:
        """Listen at this address of this machine only. Raises OSError."""
        super().__init__(acceptor.listen(address), thread="raylaunch-group-server")
        self._inbox = inbox
        self._listen_in_thread()

    def _admit(self, line: socket.socket, name: str) -> bool:
        del name  # the first message says more
        line.setblocking(True)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            line.sendall(ADMITTED)
        except OSError:
            return False
        RankLine(line, self._inbox)
        return True


class GroupWorld:
    """The ranks of one attempt that are connected."""

    def __init__(self, attempt: int = 0, size: int = 0) -> None:
        self.attempt = attempt
        self.size = size
        self.lines: dict[int, RankLine] = {}
        #: Of all ranks that were there.
        self._hellos: dict[int, RankHello] = {}
        #: By rank that can be called: the steps that were done in the restored commit.
        self._ready: dict[int, int | None] = {}

    def add(self, line: RankLine, hello: RankHello) -> None:
        """Add a rank, which cannot be called yet."""
        self.lines[hello.place.rank] = line
        self._hellos[hello.place.rank] = hello

    def ray_node(self, rank: int) -> str:
        """Return the id of a rank's node in Ray; "": the run uses no Ray."""
        return self._hellos[rank].ray_node

    def rank_of(self, line: RankLine) -> int | None:
        """Return the rank of a connection; None: it is of no rank of this attempt."""
        return next((rank for rank, own in self.lines.items() if own is line), None)

    def make_ready(self, rank: int, completed: int | None) -> None:
        """Record that a rank can be called."""
        self._ready[rank] = completed

    def remove(self, line: RankLine) -> None:
        """Record that the rank of a connection is gone, if it is one of this attempt."""
        if (rank := self.rank_of(line)) is not None:
            self.lines.pop(rank).close()
            self._ready.pop(rank, None)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks can be called."""
        return 0 < self.size == len(self._ready)

    @property
    def is_beginning(self) -> bool:
        """Whether ranks are there, and some cannot be called yet."""
        return bool(self.lines) and not self.is_whole

    @property
    def completed(self) -> int | None:
        """The steps that were done in the commit which was restored; None: there is no `State`."""
        return self._ready.get(0)

    @property
    def places(self) -> tuple[GroupRank, ...]:
        """Where the ranks are, by rank."""
        return tuple(hello.place for _, hello in sorted(self._hellos.items()))

    @property
    def node_count(self) -> int:
        """The number of nodes on which there are ranks."""
        return len({place.node for place in self.places})

    def close(self) -> None:
        """Close all connections."""
        for line in self.lines.values():
            line.close()
