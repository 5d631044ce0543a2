"""Which file is mapped at an address of this process, and how to open it again."""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A file, which may have no name any more."""

    device: int
    inode: int


class Mappings:
    """The files of which this process has mappings that it shares with others, as they are now.

    The kernel takes a microsecond to describe a mapping. It does so in the order of addresses, and those that were made
    last usually come before hundreds of libraries. So only those up to the addresses that are asked for are read.
    """

    def __init__(self) -> None:
        self._rest = _mappings()
        self._starts: list[int] = []
        #: By start: the end, what an address there is ahead of the offset in the file, and the file.
        self._mapped: list[tuple[int, int, MappedFile] | None] = []

    def at(self, address: int, length: int) -> tuple[MappedFile, int] | None:
        """Return the file, and the offset in it, of this many bytes at an address; None: in none."""
        while not self._starts or self._starts[-1] <= address:
            start, mapped = next(self._rest, (sys.maxsize, None))
            self._starts.append(start)
            self._mapped.append(mapped)
        index = bisect_right(self._starts, address) - 1
        mapped = self._mapped[index] if index >= 0 else None
        if mapped is None or address + length > mapped[0]:
            return None
        return mapped[2], address - mapped[1]


def _mappings() -> Iterator[tuple[int, tuple[int, int, MappedFile] | None]]:
    """Yield the start of each mapping, and what `Mappings` knows of it; None: it is not shared."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace", buffering=4096) as lines:
        for line in lines:
            place, mode, offset, device, inode, *_ = line.split()
            start, end = (int(text, 16) for text in place.split("-"))
            if mode[3] == "s":
                major, minor = (int(text, 16) for text in device.split(":"))
                file = MappedFile(device=os.makedev(major, minor), inode=int(inode))
                yield start, (end, start - int(offset, 16), file)
            else:
                yield start, None


def opened_as(pid: int, file: MappedFile) -> int | None:
    """Open for reading a file that a process of this user has open. None: it has not, or may not be asked."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # it was closed just now
                status = os.stat(f"{folder}/{name}")
                if (status.st_dev, status.st_ino) == (file.device, file.inode):
                    return os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return None
