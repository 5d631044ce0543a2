"""The agent's part of the memory for `State`: makes memory files for workers, and knows which commits they hold.

A worker asks over a Unix socket, and gets the descriptor of a file. The agent has a descriptor of each file too and, on
a cluster, the subreaper: the memory is free when all three are gone. Files are charged to the memory control group of
the worker that first writes them.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Collection, Iterable

import msgspec

from raylaunch.core.machine.commits import Commit, HeldCommit, RestoreOrder
from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.linux.fd_store import FdStoreClient
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.protocol import wire
from raylaunch.node.state.checkpoint_writes import CheckpointWrites, LastWrite
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.state_files import FIRST_COPY, Key, MemoryFile, StateFiles
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.commit_buffer import (
    BUFFERS_WITH_COPIES,
    COMPLETED_BUFFER,
    DURABLE_BUFFER,
    OWN_BUFFERS,
    CommitHeader,
    page_aligned,
    share_start,
)


class StateMemory:
    """The buffers of one node. Its owner waits until `fileno()` is readable, and then calls `poll`."""

    def __init__(
        self,
        page: SharedPage,
        secret: str,
        most_bytes: int | None,
        folder: RamFolder | None = None,
        store: FdStoreClient | None = None,
    ) -> None:
        """`secret`: the run's own; "": no agent can follow this one on its host.

        `most_bytes`: what all buffers may use; None: a share of what is free. `folder`: the node's,
        which its owner makes and removes. `store`: the subreaper's.

        Raises OSError.
        """
        self._page = page
        self._epoll = select.epoll()
        self.files = StateFiles(secret, most_bytes, FastDir(folder), store)
        self._has_adopted = False
        self._assignment: Assignment | None = None
        #: What was chosen for the attempt; None: not yet.
        self._chosen: RestoreOrder | None = None
        #: Whether all workers of the attempt are there, and survivors have left the last one.
        self.is_final = False
        #: Takes what the ranks restore, as JSON; of "", returns what they choose from.
        self.on_restore: Callable[[str], str] = lambda _: ""
        #: Where workers connect: an abstract name, without its first byte.
        self._listener, self.address = wire.listen()
        self._workers: dict[int, socket.socket] = {}
        for field in (fields.RESTORE_DECIDED, fields.FILES_READY):
            page.numbers[field] = 0  # an earlier run on the same page has numbered attempts, too
        self._epoll.register(self._listener, select.EPOLLIN)
        self._writes = CheckpointWrites(self._epoll)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._epoll.fileno()

    # An attempt begins.

    def begin(self, assignment: Assignment) -> None:
        """Begin an attempt with the ranks of this assignment; the first with what an agent before this one has left."""
        if not self._has_adopted:
            self._has_adopted = True
            self.files.adopt()
        self._assignment = assignment
        self._chosen, self.is_final = None, False
        for field in (fields.RESTORE_DECIDED, fields.COPYING, fields.COPIED_STEPS):
            self._page.numbers[field] = 0
        self._writes.begin(self._for_disk())

    def files_ready(self, attempt: int) -> None:
        """Tell the workers of an attempt that the folder has their files. Any thread may call this."""
        with contextlib.suppress(ValueError):  # the run is over, and the page is closed
            self._page.numbers[fields.FILES_READY] = attempt

    def held(self) -> tuple[HeldCommit, ...]:
        """Return the parts of commits that the node has. When an attempt begins, they stay so until `announce`.

        Then no worker of an earlier attempt is alive, and none of this one writes before it knows what to restore.
        """
        return self.files.held()

    def usage(self, node: NodeId) -> NodeMemory:
        """Return what this node holds."""
        own, copies = self.files.usage()
        return NodeMemory(
            node=node, own=own, copies=copies, files=self.files.folder.own_bytes, disk_seconds=self._writes.longest
        )

    def announce(self, order: RestoreOrder) -> None:
        """Tell the workers of the attempt what to restore. The node has what they need."""
        assert self._assignment is not None
        numbers = self._page.numbers
        for commit, first in ((order.commit, fields.RESTORE_ATTEMPT), (order.kept, fields.KEPT_ATTEMPT)):
            numbers[first] = commit.attempt if commit is not None else 0
            numbers[first + 1] = commit.steps if commit is not None else 0
        numbers[fields.RESTORE_WORLD_SIZE] = order.world_size
        self._chosen = order
        numbers[fields.RESTORE_DECIDED] = self._assignment.attempt

    def file_to_complete(self, attempt: int, rank: int, dead: Collection[int]) -> tuple[MemoryFile | None, int]:
        """Return the file in which this surviving rank may complete a light commit, and the newest useful commit.

        `attempt`: the one that ends. `dead`: the ranks of this node that have died in it. All ranks can only have
        commits that the dead ones made. The file is None if memory is short, or if the last commit was a whole one. The
        commit is given by its number of steps; 0: not known.
        """
        newest = min(
            (max((one.commit.steps for one, _ in self._made(one, attempt)), default=0) for one in dead), default=0
        )
        useful = [(held, size) for held, size in self._made(rank, attempt) if not dead or held.commit.steps <= newest]
        held, size = max(useful, key=lambda one: one[0].commit, default=(None, 0))
        if held is None or not held.light:
            return None, newest
        return self.files.reserve_completed((rank, COMPLETED_BUFFER), size), newest

    def _made(self, rank: int, attempt: int) -> list[tuple[HeldCommit, int]]:
        """Return the commits that a rank of this node has made in an attempt, each with its size when it is whole."""
        found = []
        for (owner, index), file in self.files:
            held, header = file.held(), file.header()
            if owner == rank and index < FIRST_COPY and held is not None and header is not None:
                size = page_aligned(share_start(*header.sizes()) + header.shared_bytes)
                found += [(held, size)] if held.commit.attempt == attempt else []
        return found

    # Copies on other hosts.

    @property
    def spared(self) -> tuple[Commit | None, Commit | None]:
        """The commits that must not be freed before newer ones are safe."""
        return (self._chosen.commit, self._chosen.kept) if self._chosen is not None else (None, None)

    def begin_copies(self, attempt: int) -> None:
        """Let the workers of an attempt mark commits that are to be copied to another host."""
        if self._assignment is not None and self._assignment.attempt == attempt:
            self._page.numbers[fields.COPYING] = attempt

    def await_copy(self, awaits: bool) -> None:
        """Let the workers, before they end after a checkpoint that is requested, wait until their commit is copied."""
        self._page.numbers[fields.AWAITS_COPY] = awaits

    @property
    def is_hurried(self) -> bool:
        """Whether the workers are about to be stopped, and wait for their last commit to be copied."""
        return bool(self._page.numbers[fields.COMMITTED_STEP])

    def to_copy(self, attempt: int) -> tuple[HeldCommit, ...]:
        """Return the parts of the newest commit of the attempt that is to be copied, if all ranks of the node have it.

        Before workers are stopped, that is the last one that is not light. Any thread may call this. A commit that is
        copied is returned again.
        """
        assignment = self._assignment
        if assignment is None or assignment.attempt != attempt:
            return ()
        if self.is_hurried:
            last = _newest(self.files.made(), assignment)
            if last and _is_last(self._page.numbers, last[0].commit, assignment):
                return last
        return _newest(self.files.kept(), assignment)

    def copied(self, commit: Commit) -> None:
        """Tell the workers that a commit of theirs is copied, and free what only older ones need."""
        assignment = self._assignment
        if assignment is not None and assignment.attempt == commit.attempt:
            self._page.numbers[fields.COPIED_STEPS] = commit.steps
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Free the files of ranks that this node does not have, and copies of commits that are not needed any more."""
        assignment = self._assignment
        if assignment is None:
            return
        made = {
            one.commit
            for _, file in self._own()
            if (one := file.kept() if assignment.nhosts > 1 else file.held()) is not None
            and one.commit.attempt == assignment.attempt
        }
        is_safe = len(made) > 1  # the second is made when all nodes have the first
        spared = set() if is_safe else {*self.spared}

        def is_stale(key: Key, file: MemoryFile) -> bool:
            held = file.held()
            if key[1] < FIRST_COPY and key[0] in assignment.ranks:
                return False
            if held is None or held.commit in spared:
                return held is None
            return key[1] < FIRST_COPY or held.commit.attempt != assignment.attempt

        self.files.drop(is_stale)

    # Requests of workers.

    def poll(self) -> None:
        """Answer the requests that have come."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                if (accepted := wire.accept(self._listener)) is not None:
                    self._workers[accepted[0].fileno()] = accepted[0]
                    self._epoll.register(accepted[0], select.EPOLLIN)
            elif fd == self._writes.fileno():
                self._writes.poll(self._for_disk())
                if self._assignment is not None:  # what came meanwhile
                    self._writes.write(self._for_disk(), self._assignment.nproc)
            elif not self._answer(self._workers[fd]):
                self._workers.pop(fd).close()

    def _answer(self, worker: socket.socket) -> bool:
        """Answer one request. Return False where the worker is gone, or is no worker of the attempt."""
        try:
            data = worker.recv(buffer_client.MESSAGE_BYTES, socket.MSG_DONTWAIT)
            request = msgspec.convert(json.loads(data), buffer_client.Request)
            if self._assignment is None or request.attempt != self._assignment.attempt:
                return False
            if request.rank not in self._assignment.ranks or request.index not in range(OWN_BUFFERS):
                return False
            if request.asks_held or request.order:
                note = self.on_restore(request.order) if self.is_final else ""
                worker.send(json.dumps({"error": "", "note": note}).encode())
                return True
            wants_part = request.part != buffer_client.NO_PART
            refused = self._reserve(request) if request.bytes and not wants_part else ""
            file = self._part(request.part) if wants_part else self.files.get((request.rank, request.index))
            self._writes.note_folder(request)
            if request.write:
                self._writes.write(self._for_disk(), self._assignment.nproc)
            answer = json.dumps({"error": refused, "note": self.files.why}).encode()
            socket.send_fds(worker, [answer], [file.fd] if file is not None and not refused else [])
        except (OSError, ValueError, msgspec.MsgspecError):
            return False
        return True

    def _for_disk(self) -> dict[int, tuple[Commit, CommitHeader]]:
        """Return the commits for the disk of this node's ranks, by descriptor of the file."""
        found = {}
        for index, file in self._own():
            held, header = file.held(), file.header()
            if index == DURABLE_BUFFER and held is not None and header is not None:
                found[file.fd] = held.commit, header
        return found

    def _own(self) -> list[tuple[int, MemoryFile]]:
        """Return the buffers of the attempt's ranks for whole commits, each with its index."""
        ranks = self._assignment.ranks if self._assignment is not None else range(0)
        return [(index, file) for (rank, index), file in self.files if rank in ranks and index < BUFFERS_WITH_COPIES]

    def _part(self, rank: int) -> MemoryFile | None:
        """Return the part of the commit to restore that this rank of its world has written, or a whole one of any."""
        chosen = self._chosen
        if chosen is None:
            return None
        if rank == buffer_client.WHOLE_PART:
            return self.files.find_whole(chosen.commit, chosen.world_size)
        return self.files.find(rank, chosen.commit, chosen.world_size)

    def _reserve(self, request: buffer_client.Request) -> str:
        """Make the buffer as large as the worker needs it. Return why that cannot be, for a person; "": it is done."""
        key = request.rank, request.index
        if self.files.get(key) is None:
            self._drop_stale()
        return self.files.reserve(key, request.bytes, node_bytes=request.node_bytes)

    def write_last(self) -> LastWrite:
        """Write what is not on disk yet, if it is to be, since the run is over. Return how far that is."""
        own = {file.fd: file.held() for _, file in self._own()}
        return self._writes.write_last({fd: held.commit for fd, held in own.items() if held is not None})

    def close(self) -> None:
        """Free all buffers: the run ends on this node."""
        self._writes.close()
        self.files.close()
        for sock in (self._listener, *self._workers.values()):
            sock.close()
        self._epoll.close()


def _newest(found: Iterable[HeldCommit], assignment: Assignment) -> tuple[HeldCommit, ...]:
    """Return the parts of the newest of these commits, if all ranks of the node have it."""
    own = [one for one in found if one.rank in assignment.ranks and one.commit.attempt == assignment.attempt]
    newest = max((one.commit for one in own), default=None)
    parts = tuple(one for one in own if one.commit == newest)
    return parts if len(parts) == assignment.nproc else ()


def _is_last(numbers: memoryview, commit: Commit, assignment: Assignment) -> bool:
    """Return whether no other commit follows: it is of the agreed step, or the workers wait to be stopped.

    `numbers`: the fields of the shared page.
    """
    slots = map(fields.slot_offset, range(min(assignment.nproc, fields.MAX_WORKERS)))
    is_agreed = commit.steps >= numbers[fields.COMMITTED_STEP]
    return is_agreed or all(numbers[slot + fields.WAITING_FOR_STOP] for slot in slots)
