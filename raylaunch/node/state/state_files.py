"""All memory files of a node: the buffers of its ranks, and copies of parts that ranks of other nodes have written.

The agent's event loop and the threads that make copies use them. On a cluster the subreaper has a duplicate of each
descriptor (`fd_store`).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.linux import limits
from raylaunch.node.linux.fd_store import FdStoreClient
from raylaunch.node.state import fast_dir
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, OWN_BUFFERS, CommitHeader

_NAME = "raylaunch-state-{run}-{index}"


class MemoryFile:
    """A file, of which only the header is mapped, once it has a size."""

    def __init__(self, fd: int) -> None:
        """`fd` is closed with this object."""
        self.fd = fd
        self._memory: mmap.mmap | None = None
        self._header: CommitHeader | None = None

    @classmethod
    def create(cls, run: str, index: int) -> MemoryFile:
        """Create an empty file, which the next agent of the run finds (`left_with`). Raises OSError."""
        return cls(os.memfd_create(_NAME.format(run=run, index=index), os.MFD_CLOEXEC))

    @property
    def size(self) -> int:
        """The present size of the file, in bytes."""
        return os.fstat(self.fd).st_size

    def header(self) -> CommitHeader | None:
        """Return the header; None: the file is too small to have one. It may only be written where nobody else does."""
        if self._header is None and self.size >= HEADER_BYTES:
            self._memory = mmap.mmap(self.fd, HEADER_BYTES)
            self._header = CommitHeader(memoryview(self._memory))
        return self._header

    def held(self, *, copied: bool = False) -> HeldCommit | None:
        """Return the part of a commit that it has; None: no whole one. `copied`: whether the file is a copy."""
        header = self.header()
        found = header.held() if header is not None else None
        return replace(found, copied=True) if found is not None and copied else found

    def kept(self) -> HeldCommit | None:
        """Return the part that it has, if that is one of a commit to copy to other hosts."""
        header = self.header()
        return header.held() if header is not None and header.is_kept else None

    @property
    def is_light(self) -> bool:
        """Whether its part lacks the tensors that are equal on all ranks."""
        held = self.held()
        return held is not None and held.light

    def close(self) -> None:
        """Close the file. Its memory is free when nobody else has it open."""
        if self._header is not None and self._memory is not None:
            self._header.close()
            self._memory.close()
        os.close(self.fd)


def left_with(folder: str, run: str) -> Iterator[tuple[int, MemoryFile]]:
    """Yield the memory files of a run in processes that have this folder open, each with its index."""
    name = _NAME.format(run=re.escape(run), index=r"(\d+)")
    pattern = re.compile(rf"/memfd:{name} \(deleted\)")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        links = _links(f"/proc/{pid}/fd")
        for path, link in links.items() if folder in links.values() else ():
            with contextlib.suppress(OSError):
                if (match := pattern.fullmatch(link)) is not None:
                    yield int(match[1]), MemoryFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))


def _links(folder: str) -> dict[str, str]:
    """Return the names of the descriptors of a process by their paths; empty if it is another user's."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                found[f"{folder}/{fd}"] = os.readlink(f"{folder}/{fd}")
    return found


_SHARE = 0.5
"""The part of the free memory that `State` may use, if the job does not say how much."""
FOLDER = "folder"
"""The name of the node's folder in the subreaper's store; the descriptor has a lock on it."""
PORT = "port "
"""What the name of the socket begins with that listens for other agents. Its secret follows."""
FIRST_COPY = OWN_BUFFERS
"""The index of a rank's first copy. The buffers that the rank itself writes have lower ones."""

Key = tuple[int, int]
"""Rank and index."""


class StateFiles:
    """The files, by rank and index. Any thread may call the methods."""

    def __init__(
        self, secret: str, most_bytes: int | None, folder: FastDir, store: FdStoreClient | None = None
    ) -> None:
        """All as in `StateMemory`."""
        self.folder = folder
        self._store = store or FdStoreClient()
        #: By it the next agent finds what this one leaves; "": there can be no other one.
        self._run = folder.run = hashlib.sha256(secret.encode()).hexdigest()[:32] if secret else ""
        self._most_bytes = most_bytes
        self._files: dict[Key, MemoryFile] = {}
        #: Copies that are being written.
        self._busy: set[Key] = set()
        self._lock = threading.RLock()
        #: Why the files would be lost with this agent, for a person; "": they would not, or no other one can come.
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

    def made(self) -> tuple[HeldCommit, ...]:
        """Return the parts in buffers of the node's own ranks that are not light."""
        with self._lock:
            found = (file.held() for (_, index), file in self if index < FIRST_COPY)
            return tuple(one for one in found if one is not None and not one.light)

    def find(self, rank: int, commit: Commit | None, world_size: int) -> MemoryFile | None:
        """Return a file with the part that this rank of a world of this size has written; None: there is none.

        If there are two, it is the one that is not light.
        """
        with self._lock:
            found = [(file, held) for file, held in self._of(commit, world_size) if held.rank == rank]
        return min(found, key=lambda one: one[1].light)[0] if found else None

    def find_whole(self, commit: Commit | None, world_size: int) -> MemoryFile | None:
        """Return a file with a part that has all tensors that are equal on all ranks; None: there is none."""
        with self._lock:
            return next((file for file, held in self._of(commit, world_size) if held.shares_alone), None)

    def _of(self, commit: Commit | None, world_size: int) -> Iterator[tuple[MemoryFile, HeldCommit]]:
        """Yield the files that have a part, whole, of this commit of a world of this size."""
        for _, file in self:
            held = file.held()
            if held is not None and (held.commit, held.world_size) == (commit, world_size):
                yield file, held

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
                    self.add(key, MemoryFile.create(self._run, key[1]))
                os.ftruncate(self._files[key].fd, size)
            except OSError as error:
                return limits.explained(error, "the agent")
            return ""

    def reserve_completed(self, key: Key, size: int) -> MemoryFile | None:
        """Return the file in which a rank completes a light commit; None: there is no memory for it.

        `key`: with `COMPLETED_BUFFER`. The node has one such file, and gives it to the rank that needs it. What the
        file had is not needed any more.
        """
        with self._lock:
            for other in [other for other in self._files if other[1] == key[1] and other != key]:
                if key in self._files:
                    self._pop(key).close()
                self.add(key, self._pop(other))
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
                self._pop(key).close()

    @contextlib.contextmanager
    def writing_copy(
        self, held: HeldCommit, size: int, spared: Collection[Commit | None], *, staying: int = 0
    ) -> Iterator[MemoryFile | str]:
        """Give a file of this size for a copy, or say why there is none.

        It takes the place of one other copy at most: the one of the same commit, or else one that is not safe. Safe are
        the last `staying` marked commits of the same attempt, and while there are fewer, also spared ones; where
        `staying` is 0, only these. If that leaves no memory for a third copy, one marked commit is safe instead of two.
        """
        with self._lock:
            key, why = self._reserve_copy(held, size, spared, staying)
            if why and staying > 1:
                key, why = self._reserve_copy(held, size, spared, 1)
            if not why and (header := self._files[key].header()) is not None:
                header.unseal()
            self._busy.add(key)
        try:
            yield why or self._files[key]
        finally:
            with self._lock:
                self._busy.discard(key)

    def _reserve_copy(
        self, held: HeldCommit, size: int, spared: Collection[Commit | None], staying: int
    ) -> tuple[Key, str]:
        """Return where a copy can be written, in a file of this size, and why it cannot, as `reserve` does."""
        copies = {key: file for key, file in self if key[0] == held.rank and key[1] >= FIRST_COPY}
        commits = {key: one.commit for key, file in copies.items() if (one := file.held()) is not None}
        again = {key for key, commit in commits.items() if commit == held.commit}
        marked = {
            key for key, commit in commits.items() if commit.attempt == held.commit.attempt and copies[key].kept()
        }
        safe = {*sorted(marked - again, key=lambda key: commits[key])[-staying:]} if staying else set()
        if not staying or len(safe) < staying:
            safe |= {key for key, commit in commits.items() if commit in spared}
        free = (again or copies.keys() - safe) - self._busy
        if free:  # one that need not grow, and of these one that has nothing
            key = max(sorted(free), key=lambda key: (min(copies[key].size, size), key not in commits))
        else:
            key = held.rank, next(index for index in count(FIRST_COPY) if (held.rank, index) not in copies)
        return key, self.reserve(key, size)

    # For other agents.

    def adopt(self) -> None:
        """Take what agents of the run have left that were killed on this host. What this one has stays as it is."""
        if not self._run:
            return
        with self._lock:
            for root in fast_dir.abandoned(self._run):
                for index, file in left_with(root, self._run):
                    held = file.held()
                    if held is None or (held.rank, index) in self._files:
                        file.close()
                    else:
                        self.add((held.rank, index), file)
                self.folder.adopt(root)
            if (fd := self.folder.hold()) >= 0:
                self._tell_store(lambda: self._store.keep(FOLDER, fd))

    def add(self, key: Key, file: MemoryFile) -> None:
        """Add a file, which the next agent gets if this one is killed. If it does not, the next commit reports that."""
        self._files[key] = file
        if self._run:
            self._tell_store(lambda: self._store.keep(f"{key[0]} {key[1]}", file.fd))

    def _pop(self, key: Key) -> MemoryFile:
        self._store.drop(f"{key[0]} {key[1]}")
        return self._files.pop(key)

    def _tell_store(self, tell: Callable[[], None]) -> None:
        try:
            tell()
            self.why = ""
        except OSError as error:
            self.why = f"what `State` holds will not survive the agent: {limits.explained(error, 'the agent')}"

    def answer_when_killed(self, fd: int, secret: str) -> None:
        """Let other agents get the files at this listening socket if this agent is killed. `secret`: that they know."""
        if self._run:
            self._tell_store(lambda: self._store.keep(PORT + secret, fd))

    def close(self) -> None:
        """Free all files: the run ends on this node, or another one is to have nothing of this agent."""
        with self._lock:
            self._run = ""  # a copy that is still being made is for nobody
            self._store.drop_all()
            for file in self._files.values():
                file.close()
            self._files.clear()


def _shown(size: float) -> str:
    """Return a number of bytes as a person reads it. From 1 GiB on, it has the unit of `state_memory`."""
    unit, one = next((found for found in (("GiB", 2**30), ("MiB", 2**20)) if size >= found[1]), ("KiB", 2**10))
    return f"{size / one:.2f} {unit}"
