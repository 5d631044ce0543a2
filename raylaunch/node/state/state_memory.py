"""The agent's part of the memory for `State`: makes memory files for workers, and knows which commits they hold.

A worker asks over a Unix socket, and gets the descriptor of a file. The agent has a descriptor of each file too, and so
has the state keeper, if there is one: the memory is free when all three are gone. Files are charged to the memory
control group of the worker that first writes them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
from dataclasses import dataclass

from raylaunch.core.machine.commits import HeldCommit
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.linux import limits
from raylaunch.node.protocol.messages import AnnounceCommit
from raylaunch.node.state import fd_store
from raylaunch.node.state.fd_store_client import FdStoreClient
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.commit_buffer import BUFFERS, HEADER_BYTES, CommitHeader

_SHARE = 0.5
"""The part of the free memory that `State` may use, if the job does not say how much."""
_BACKLOG = 1024
_MOST_KEEPERS = 10
"""State keepers that are started: what kills one after the other would kill the next one too."""


@dataclass(slots=True)
class _File:
    """One buffer. `header` is mapped once the file has a size."""

    fd: int
    memory: mmap.mmap | None = None
    header: CommitHeader | None = None

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def held(self) -> HeldCommit | None:
        if self.header is None and self.size >= HEADER_BYTES:
            self.memory = mmap.mmap(self.fd, HEADER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
            self.header = CommitHeader(memoryview(self.memory))
        return self.header.held() if self.header is not None else None

    def close(self) -> None:
        if self.header is not None and self.memory is not None:
            self.header.close()
            self.memory.close()
        os.close(self.fd)


class StateMemory:
    """The buffers of one node. Its owner waits until `fileno()` is readable, and then calls `poll`."""

    def __init__(self, page: SharedPage, secret: str, most_bytes: int | None) -> None:
        """`secret`: as in `FdStoreClient`. `most_bytes`: what all buffers may use; None: a share of what is free.

        Raises OSError.
        """
        self._page = page
        self._most_bytes = most_bytes
        #: By rank and index.
        self._files: dict[tuple[int, int], _File] = {}
        self._assignment: Assignment | None = None
        self._keeper = FdStoreClient(secret)
        self._keepers_left = _MOST_KEEPERS
        #: Why there is no state keeper, for a person; "": there is one, or there need not be.
        self._why = ""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # the kernel chooses an abstract name (unix(7), autobind)
        self._listener.listen(_BACKLOG)
        #: Where workers connect: an abstract name, without its first byte.
        self.address: str = self._listener.getsockname()[1:].decode()
        self._workers: dict[int, socket.socket] = {}
        self._page.numbers[fields.RESTORE_DECIDED] = 0  # an earlier run on the same page has numbered attempts, too
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._epoll.fileno()

    # An attempt begins.

    def begin(self, assignment: Assignment) -> None:
        """Take note of the ranks of an attempt, and look for what an agent before this one has left of them."""
        self._assignment = assignment
        self._page.numbers[fields.RESTORE_DECIDED] = 0
        lacking = [
            rank for rank in assignment.ranks if not any((rank, index) in self._files for index in range(BUFFERS))
        ]
        if lacking:
            with contextlib.suppress(OSError):
                self._adopt(lacking)

    def _adopt(self, ranks: list[int]) -> None:
        if self._keeper.fileno() < 0 and self._keeper.connect():
            self._epoll.register(self._keeper, select.EPOLLIN)
        try:
            for rank, index, fd in self._keeper.take(ranks):
                self._files[rank, index] = _File(fd)
        except OSError:
            self._lose_keeper()
            raise

    def held(self) -> tuple[HeldCommit, ...]:
        """Return the commits of the attempt's ranks. Before it begins they are what they stay until `announce`.

        Then no worker of an earlier attempt is alive, and none of this one writes before it knows what to restore.
        """
        ranks = self._assignment.ranks if self._assignment is not None else range(0)
        found = [file.held() for (rank, _), file in sorted(self._files.items()) if rank in ranks]
        return tuple(one for one in found if one is not None)

    def announce(self, order: AnnounceCommit) -> None:
        """Tell the workers of the attempt what to restore."""
        if self._assignment is None or order.attempt != self._assignment.attempt:
            return
        commit = order.commit
        self._page.numbers[fields.RESTORE_ATTEMPT] = commit.attempt if commit is not None else 0
        self._page.numbers[fields.RESTORE_STEPS] = commit.steps if commit is not None else 0
        self._page.numbers[fields.RESTORE_DECIDED] = order.attempt

    # Requests of workers.

    def poll(self) -> None:
        """Answer the requests that have come, and replace a state keeper that is gone."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._keeper.fileno():
                self._lose_keeper()
                self._keep_all()
            elif not self._answer(self._workers[fd]):
                self._workers.pop(fd).close()

    def _accept(self) -> None:
        """Take the connection of a worker; close that of another user, whose connections would use up descriptors."""
        with contextlib.suppress(OSError):
            worker = self._listener.accept()[0]
            if not fd_store.peer_is_same_user(worker):
                worker.close()
                return
            self._workers[worker.fileno()] = worker
            self._epoll.register(worker, select.EPOLLIN)

    def _answer(self, worker: socket.socket) -> bool:
        """Answer one request. Return False where the worker is gone, or is no worker of the attempt."""
        try:
            data = worker.recv(fd_store.MESSAGE_BYTES, socket.MSG_DONTWAIT)
            request = buffer_client.parse(data) if data else None
            if request is None or self._assignment is None or request.attempt != self._assignment.attempt:
                return False
            if request.rank not in self._assignment.ranks or request.index not in range(BUFFERS):
                return False
            refused = self._reserve(request) if request.bytes else ""
            file = self._files.get((request.rank, request.index))
            answer = json.dumps({"error": refused, "note": self._why}).encode()
            socket.send_fds(worker, [answer], [file.fd] if file is not None and not refused else [])
        except OSError:
            return False
        return True

    def _reserve(self, request: buffer_client.Request) -> str:
        """Make the buffer as large as the worker needs it. Return why that cannot be, for a person; "": it is done."""
        key = request.rank, request.index
        size = self._files[key].size if key in self._files else 0
        if request.bytes <= size:
            return ""
        if key not in self._files:
            self._drop_others()
        used = sum(file.size for file in self._files.values())
        needed = max(used - size + request.bytes, request.node_bytes)
        most, what = self._limit(used)
        if needed > most:
            return (
                f"the buffers of `State` need {_gib(needed)} of this node's memory, and may use {_gib(most)}: {what}; "
                "`state_memory` sets how much it may be"
            )
        try:
            if key not in self._files:
                self._files[key] = _File(os.memfd_create(f"raylaunch-state-{request.rank}", os.MFD_CLOEXEC))
            os.ftruncate(self._files[key].fd, request.bytes)
        except OSError as error:
            return limits.explained(error, "the agent")
        self._keep(key)
        return ""

    def _limit(self, used: int) -> tuple[float, str]:
        """Return what all buffers may use, given what they use, and the reason for it."""
        free, what = limits.free_memory()
        if self._most_bytes is None:
            return used + free * _SHARE, f"half of what is free; {what}"
        if self._most_bytes > used + free:
            return used + free, what
        return self._most_bytes, "the job allows no more"

    def _drop_others(self) -> None:
        """Free the buffers of ranks that this node does not have any more."""
        ranks = self._assignment.ranks if self._assignment is not None else range(0)
        for key in [key for key in self._files if key[0] not in ranks]:
            self._files.pop(key).close()
            with contextlib.suppress(OSError):
                self._keeper.drop(*key)

    # The state keeper.

    def _keep(self, key: tuple[int, int]) -> None:
        """Have the state keeper hold a file too. Without one, training goes on; what is lost then is said."""
        try:
            if self._keeper.fileno() < 0:
                if not self._keepers_left:
                    return
                self._keepers_left -= 1
                self._keeper.start()
                if self._keeper.fileno() < 0:
                    return
                self._epoll.register(self._keeper, select.EPOLLIN)
            self._keeper.keep(*key, self._files[key].fd)
            self._why = ""
        except OSError as error:
            self._lose_keeper()
            self._why = f"what `State` holds will not survive the agent: {limits.explained(error, 'the agent')}"

    def _keep_all(self) -> None:
        for key in self._files:
            self._keep(key)

    def _lose_keeper(self) -> None:
        if self._keeper.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._keeper)
        self._keeper.disconnect()

    def close(self) -> None:
        """Free all buffers: the run ends on this node."""
        self._keeper.leave()
        for file in self._files.values():
            file.close()
        self._files.clear()
        for sock in (self._listener, *self._workers.values()):
            sock.close()
        self._epoll.close()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
