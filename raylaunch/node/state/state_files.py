"""All memory files of a node: the buffers of its ranks, and copies of parts that ranks of other nodes have written.

The agent's event loop and the threads that make copies use them. The state keeper, if there is one, has a duplicate of
each descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.linux import limits
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.fd_store_client import FdStoreClient
from raylaunch.node.state.memory_file import MemoryFile
from raylaunch.worker.state.commit_buffer import OWN_BUFFERS

_SHARE = 0.5
"""The part of the free memory that `State` may use, if the job does not say how much."""
_MOST_KEEPERS = 10
"""State keepers that are started: what kills one after the other would kill the next one too."""
FIRST_COPY = OWN_BUFFERS
"""The index of a rank's first copy. The buffers that the rank itself writes have lower ones."""

Key = tuple[int, int]
"""Rank and index."""


class StateFiles:
    """The files, by rank and index. Any thread may call the methods, but only the event loop `renew_keeper`."""

    def __init__(self, secret: str, most_bytes: int | None, epoll: select.epoll, folder: FastDir) -> None:
        """`secret`, `most_bytes` and `folder`: as in `StateMemory`. `epoll` has the connection to the state keeper."""
        self.folder = folder
        #: Whether the state keeper has the folder for the next agent.
        self.protects_folder = False
        self._is_over = False
        self._most_bytes = most_bytes
        self._epoll = epoll
        self._files: dict[Key, MemoryFile] = {}
        #: Copies that are being written.
        self._busy: set[Key] = set()
        self._lock = threading.RLock()
        self._keeper = FdStoreClient(secret)
        self._keepers_left = _MOST_KEEPERS
        #: The listening socket for other agents, and its secret; None: it is not there yet.
        self._port: tuple[int, str] | None = None
        #: Why there is no state keeper, for a person; "": there is one, or there need not be.
        self.why = ""

    def __iter__(self) -> Iterator[tuple[Key, MemoryFile]]:
        """Yield all files with their keys, in order."""
        with self._lock:
            return iter(sorted(self._files.items()))

    def get(self, key: Key) -> MemoryFile | None:
        """Return a file; None: there is none."""
        return self._files.get(key)

    def held(self) -> tuple[HeldCommit, ...]:
        """Return the parts of commits that the files have, whole."""
        with self._lock:
            found = (file.held(copied=index >= FIRST_COPY) for (_, index), file in self)
            return tuple(one for one in found if one is not None)

    def kept(self) -> tuple[HeldCommit, ...]:
        """Return the parts in buffers of the node's own ranks that are to be copied."""
        with self._lock:
            found = (file.kept() for (_, index), file in self if index < FIRST_COPY)
            return tuple(one for one in found if one is not None)

    def find(self, rank: int, commit: Commit | None, world_size: int) -> MemoryFile | None:
        """Return a file with the part that this rank of a world of this size has written; None: there is none.

        If there are two, it is the one that is not light.
        """
        light = None
        with self._lock:
            for (owner, _), file in self:
                held = file.held() if file.has(commit, world_size) else None
                if owner == rank and held is not None and held.rank == rank:
                    if not held.light:
                        return file
                    light = file
        return light

    def find_whole(self, commit: Commit | None, world_size: int) -> MemoryFile | None:
        """Return a file with a part that has all tensors that are equal on all ranks; None: there is none."""
        with self._lock:
            for _, file in self:
                held = file.held() if file.has(commit, world_size) else None
                if held is not None and held.shares_alone:
                    return file
        return None

    @contextlib.contextmanager
    def reading(self, rank: int, commit: Commit, world_size: int) -> Iterator[int | None]:
        """Give the descriptor of such a file, which stays open meanwhile."""
        with self._lock:
            file = self.find(rank, commit, world_size)
            fd = os.dup(file.fd) if file is not None else None
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def usage(self) -> tuple[int, int]:
        """Return the sizes in bytes of all buffers of the node's own ranks, and of all copies."""
        with self._lock:
            copied = self.folder.copied_bytes
            sizes = [(index >= FIRST_COPY, file.size) for (_, index), file in self]
        own = sum(size for is_copy, size in sizes if not is_copy)
        return own, copied + sum(size for is_copy, size in sizes if is_copy)

    # Memory.

    def reserve(self, key: Key, size: int, *, node_bytes: int = 0) -> str:
        """Make a file as large as this. Return why that cannot be, for a person; `""`: it is done.

        `node_bytes`: what is needed on this node in all.
        """
        with self._lock:
            before = self._files[key].size if key in self._files else 0
            if size <= before:
                return ""
            files = self.folder.own_bytes + self.folder.copied_bytes
            used = sum(file.size for file in self._files.values()) + files
            needed = max(used - before + size, node_bytes + files)
            most, what = self._limit(used)
            if needed > most:
                return (
                    f"the buffers of `State` need {_shown(needed)} of this node's memory, and may use {_shown(most)}: "
                    f"{what}; `state_memory` sets how much it may be"
                )
            try:
                if key not in self._files:
                    self._files[key] = MemoryFile.create(key[0])
                os.ftruncate(self._files[key].fd, size)
            except OSError as error:
                return limits.explained(error, "the agent")
            self._keep(key)
            return ""

    def reserve_completed(self, key: Key, size: int) -> MemoryFile | None:
        """Return the file in which a rank completes a light commit; None: there is no memory for it.

        `key`: with `COMPLETED_BUFFER`. The node has one such file, and gives it to the rank that needs it. What the
        file had is not needed any more.
        """
        with self._lock:
            for other in [other for other in self._files if other[1] == key[1] and other != key]:
                if key in self._files:
                    self._files[key].close()
                self._files[key] = self._files.pop(other)
                with contextlib.suppress(OSError):
                    self._keeper.drop(*other)
                self._keep(key)
            if key in self._files and (header := self._files[key].header()) is not None:
                header.unseal()
            return None if self.reserve(key, size) else self._files[key]

    def _limit(self, used: int) -> tuple[float, str]:
        """Return what all files may use, given what they use, and the reason for it."""
        free, what = limits.free_memory()
        if self._most_bytes is None:
            return used + free * _SHARE, f"half of what is free; {what}"
        if self._most_bytes > used + free:
            return used + free, what
        return self._most_bytes, "the job allows no more"

    def why_no_room(self, size: int) -> str:
        """Return why this node must not copy a file of `size` bytes, for a person; "": it may."""
        with self._lock:
            used = sum(self.usage()) + self.folder.own_bytes
        most, what = self._limit(used)
        if used + size > most:
            return (
                f"files and `State` would need {_shown(used + size)} of that node's memory, and may use "
                f"{_shown(most)}: {what}; `state_memory` sets how much it may be"
            )
        if size > (room := shutil.disk_usage(self.folder.root).free // 2):
            return f"the file has {_shown(size)}, and {_shown(room)}, half of what is free, may be used of /dev/shm"
        return ""

    def drop(self, is_useless: Callable[[Key, MemoryFile], bool]) -> None:
        """Free files, except copies that are being written."""
        with self._lock:
            for key in [key for key, file in self if key not in self._busy and is_useless(key, file)]:
                self._files.pop(key).close()
                with contextlib.suppress(OSError):
                    self._keeper.drop(*key)

    @contextlib.contextmanager
    def writing_copy(self, held: HeldCommit, size: int, spared: Iterable[Commit | None]) -> Iterator[MemoryFile | str]:
        """Give a file of this size for a copy, or say why there is none.

        A copy of a spared commit is not overwritten, and neither is the newest copy of the same attempt: when another
        commit is copied, that one is complete on all hosts. A commit that comes again takes the place of its copy.
        """
        with self._lock:
            copies = {key: file for key, file in self if key[0] == held.rank and key[1] >= FIRST_COPY}
            found = [(one.commit, key) for key, file in copies.items() if (one := file.held()) is not None]
            again = [key for commit, key in found if commit == held.commit]
            others = [(commit, key) for commit, key in found if commit != held.commit]
            present = [(commit, key) for commit, key in others if commit.attempt == held.commit.attempt]
            safe = {max(present)[1]} if present else {key for commit, key in others if commit in set(spared)}
            free = [key for key in again or copies if key not in safe and key not in self._busy]
            taken = {index for _, index in copies}
            index = next(index for index in range(FIRST_COPY, FIRST_COPY + len(taken) + 1) if index not in taken)
            key = free[0] if free else (held.rank, index)
            if free and (header := copies[key].header()) is not None:
                header.unseal()
            why = self.reserve(key, size)
            self._busy.add(key)
        try:
            yield why or self._files[key]
        finally:
            with self._lock:
                self._busy.discard(key)

    # The state keeper.

    def adopt(self) -> None:
        """Take what an agent before this one has left on this host. Files that this one has stay as they are."""
        with self._lock, contextlib.suppress(OSError):
            if self._keeper.fileno() < 0 and self._keeper.connect():
                self._epoll.register(self._keeper, select.EPOLLIN)
            try:
                for rank, index, fd in self._keeper.take():
                    if (rank, index) in self._files:
                        os.close(fd)
                    else:
                        self._files[rank, index] = MemoryFile(fd)
                for path in self._keeper.orphaned_folders:
                    self.folder.adopt(path)
                    self._keeper.release(path)
            except OSError:
                self._lose_keeper()

    def protect_folder(self) -> None:
        """Keep the folder if this agent dies. If there is no state keeper, the next commit reports that."""
        with self._lock:
            if not (self.protects_folder or self._is_over):
                self.protects_folder = True
                self._tell_keeper(lambda: self._keeper.protect(self.folder.root))

    def release_folder(self) -> None:
        """Let the folder be removed by whoever ends last on this node: the run ends."""
        self.folder.release()
        with self._lock, contextlib.suppress(OSError):
            self._is_over = True
            if self.protects_folder:
                self.protects_folder = False
                self._keeper.release(self.folder.root)

    def answer_when_killed(self, fd: int, secret: str) -> None:
        """Let other agents get the files at this listening socket if this agent is killed. `secret`: that they know."""
        with self._lock, contextlib.suppress(OSError):
            self._port = fd, secret
            if self._keeper.fileno() >= 0:
                self._keeper.answer(fd, secret)

    @property
    def keeper_fd(self) -> int:
        """The descriptor of the connection to the state keeper, -1: there is none."""
        return self._keeper.fileno()

    def renew_keeper(self) -> None:
        """Replace a state keeper that is gone."""
        with self._lock:
            self._lose_keeper()
            for key in self._files:
                self._keep(key)
            if self.protects_folder:
                self._tell_keeper(lambda: self._keeper.protect(self.folder.root))

    def _keep(self, key: Key) -> None:
        self._tell_keeper(lambda: self._keeper.keep(*key, self._files[key].fd))

    def _tell_keeper(self, tell: Callable[[], None]) -> None:
        """Tell the state keeper something. Without a keeper, training goes on, and a message says what is lost."""
        try:
            if self._keeper.fileno() < 0:
                if not self._keepers_left:
                    return
                self._keepers_left -= 1
                self._keeper.start()
                if self._keeper.fileno() < 0:
                    return
                self._epoll.register(self._keeper, select.EPOLLIN)
                if self._port is not None:
                    self._keeper.answer(*self._port)
            tell()
            self.why = ""
        except OSError as error:
            self._lose_keeper()
            self.why = f"what `State` holds will not survive the agent: {limits.explained(error, 'the agent')}"

    def _lose_keeper(self) -> None:
        if self._keeper.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._keeper)
        self._keeper.disconnect()

    def close(self) -> None:
        """Free all files: the run ends on this node."""
        with self._lock:
            self._is_over = True
            self._keepers_left = 0  # a copy that is still being made needs none
            self._keeper.leave()
            for file in self._files.values():
                file.close()
            self._files.clear()


def _shown(size: float) -> str:
    """Return a number of bytes as a person reads it. From 1 GiB on, it has the unit of `state_memory`."""
    unit, one = next((found for found in (("GiB", 2**30), ("MiB", 2**20)) if size >= found[1]), ("KiB", 2**10))
    return f"{size / one:.2f} {unit}"
