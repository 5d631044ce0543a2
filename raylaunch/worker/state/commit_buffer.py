"""One buffer for a rank's part of a commit: a memory file (memfd) of the node, mapped into the worker.

The file begins with a header of 64-bit numbers. Behind it are the tensors, each aligned, and then the pickle of
everything else. SEALED is set last, and cleared before anything is overwritten: a buffer whose writer died in the
middle does not count. Each rank has two buffers, so the commit before stays until the next one is sealed.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.heartbeats import shared_page

BUFFERS: Final = 2
"""Per rank."""
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
"""Of each tensor, in bytes: that of torch's own allocations."""
_VERSION: Final = 0x524C_5354_0001
"""In the field FORMAT: "RLST", and the version of the layout."""

_FORMAT: Final = 0
_SEALED: Final = 1
"""1 if all the rest is whole."""
_ATTEMPT: Final = 2
_STEPS: Final = 3
_WORLD_SIZE: Final = 4
_RANK: Final = 5
_TENSOR_BYTES: Final = 6
_PICKLE_BYTES: Final = 7
_FIELDS: Final = 8


def bytes_needed(tensors: int, pickled: int) -> int:
    """Return the size of a file for so many bytes of tensors, and of a pickle that may become a little larger."""
    return HEADER_BYTES + tensors + pickled + pickled // 4 + HEADER_BYTES


class CommitHeader:
    """The header of a buffer, in memory of this process that is mapped to the file."""

    def __init__(self, memory: memoryview) -> None:
        self._numbers = memory[:HEADER_BYTES].cast("q")

    def held(self) -> HeldCommit | None:
        """Return which commit the buffer has; None: it has no whole one."""
        numbers = self._numbers
        if not numbers[_SEALED] or numbers[_FORMAT] != _VERSION:
            return None
        commit = Commit(numbers[_ATTEMPT], numbers[_STEPS])
        return HeldCommit(rank=numbers[_RANK], world_size=numbers[_WORLD_SIZE], commit=commit)

    def unseal(self) -> None:
        """Invalidate what the buffer has."""
        self._numbers[_SEALED] = 0

    def seal(self, held: HeldCommit, *, tensors: int, pickled: int) -> None:
        """Declare that the buffer has this commit, whole. `tensors` and `pickled` are numbers of bytes."""
        values = (_VERSION, 0, held.commit.attempt, held.commit.steps, held.world_size, held.rank, tensors, pickled)
        for field, value in zip(range(_FIELDS), values, strict=True):
            self._numbers[field] = value
        self._numbers[_SEALED] = 1

    def close(self) -> None:
        """Give the memory free, which can be unmapped then."""
        self._numbers.release()

    def sizes(self) -> tuple[int, int]:
        """Return the numbers of bytes of the tensors and of the pickle."""
        return self._numbers[_TENSOR_BYTES], self._numbers[_PICKLE_BYTES]


class CommitBuffer:
    """A buffer in the worker: the header and all that is behind it."""

    def __init__(self, fd: int) -> None:
        """Map the file, and close the descriptor. Raises OSError."""
        try:
            self.size = os.fstat(fd).st_size
            #: As ctypes has it, from which torch makes a tensor.
            self.memory = shared_page.map_file(fd, self.size)
        finally:
            os.close(fd)
        self._view = memoryview(self.memory).cast("B")
        self.header = CommitHeader(self._view)

    def write_pickle(self, pickled: bytes, *, tensors: int) -> None:
        """Write the pickle behind so many bytes of tensors."""
        start = HEADER_BYTES + tensors
        self._view[start : start + len(pickled)] = pickled

    def read_pickle(self) -> bytes:
        """Return the pickle. Raises ValueError where the header does not fit the file."""
        tensors, pickled = self.header.sizes()
        start = HEADER_BYTES + tensors
        if min(tensors, pickled) < 0 or start + pickled > self.size:
            msg = f"the buffer has {self.size} bytes, and its header says more"
            raise ValueError(msg)
        return bytes(self._view[start : start + pickled])


def round_up(size: int, to: int = ALIGNMENT) -> int:
    """Return the least multiple that is not below a size."""
    return -(-size // to) * to


def page_aligned(size: int) -> int:
    """Return the size of a file that has so many bytes, in whole pages."""
    return round_up(size, mmap.PAGESIZE)
