"""A memory file of a node (memfd) with one rank's part of a commit, as the agent sees it."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitHeader

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

    def has(self, commit: Commit | None, world_size: int | None = None) -> bool:
        """Return whether it has a part of this commit, whole. `world_size` None: of any world."""
        held = self.held()
        return held is not None and held.commit == commit and world_size in (None, held.world_size)

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
