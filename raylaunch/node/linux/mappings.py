"""Which file is mapped at an address of this process, and how to open it again."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A file, which may have no name any more."""

    device: int
    inode: int


class Mappings:
    """The files of which this process has mappings that it shares with others, as they are now."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        #: By start: the end, the offset in the file, and the file.
        self._mapped: list[tuple[int, int, MappedFile]] = []
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line[line.index(" ") + 4] != "s":
                    continue
                place, _, offset, device, inode, *_ = line.split()
                start, end = (int(text, 16) for text in place.split("-"))
                major, minor = (int(text, 16) for text in device.split(":"))
                self._starts.append(start)
                file = MappedFile(device=os.makedev(major, minor), inode=int(inode))
                self._mapped.append((end, int(offset, 16) - start, file))

    def at(self, address: int, length: int) -> tuple[MappedFile, int] | None:
        """Return the file, and the offset in it, of this many bytes at an address; None: in none."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        end, shift, file = self._mapped[index]
        return (file, address + shift) if address + length <= end else None


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
