"""One buffer for a rank's part of a commit: a memory file (memfd) of the node, mapped into the worker.

The file begins with a header of 64-bit numbers. Behind it are the tensors, each aligned, then the pickle of everything
else, and then the rank's share of the tensors that are equal on all ranks (see `shared_tensors`). SEALED is set last,
and cleared before anything is overwritten: a buffer whose writer died in the middle does not count. Each rank has two
buffers, so the commit before stays until the next one is sealed. With a durable folder it has a third one, whose commit
stays until it is written to disk.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Any, Final

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.heartbeats import shared_page

BUFFERS: Final = 3
"""Per rank, the one for the disk included."""
DURABLE_BUFFER: Final = 2
"""The index of the one for the disk. The others are overwritten by turns."""
BUFFERS_WITH_COPIES: Final = 5
"""The same in a world of several hosts: two more hold the commits of which copies are made, or were made last."""
LIGHT_BUFFERS: Final = (5, 6)
"""The indices of those for light commits, which take turns."""
COMPLETED_BUFFER: Final = 7
"""The index of the one in which a survivor completes its last light commit."""
OWN_BUFFERS: Final = 8
"""All of them."""
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
"""Alignment of each tensor, in bytes, as in torch's own allocations."""
_VERSION: Final = 0x524C_5354_0005
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
_REPLICATED: Final = 8
"""1 if the parts of all ranks have the same tensors: there is no DTensor in them that is sharded."""
_TOKEN: Final = 9
"""A random number, the same for all parts of a commit, and for no commit of another attempt."""
_WRITE: Final = 10
"""The `WriteState` of the buffer for the disk. The worker sets TO_WRITE; the agent sets the later ones."""
_KEPT: Final = 11
"""1 if the commit is to be copied to another host. It is not overwritten before a newer one is copied."""
_INTERVAL: Final = 12
"""After how many steps all ranks make the next commit, as they had agreed when this one was made."""
_FIRST_SHARER: Final = 13
_SHARERS: Final = 14
_DIGEST: Final = 15
_SHARED_BYTES: Final = 16
"""Bytes of all tensors that are equal on all ranks, of which this part has the rank's share."""
_LIGHT: Final = 17
"""1 if the part has nothing of them."""
_FIELDS: Final = 18
_OUTCOME: Final = 2048
"""Offset in the header: what became of writing, for a person, in UTF-8, up to a zero byte."""


class WriteState(IntEnum):
    """What became of the buffer for the disk."""

    NONE = 0
    TO_WRITE = 1
    WRITTEN = 2
    FAILED = 3


def bytes_needed(tensors: int, pickled: int, share: int = 0) -> int:
    """Return the size of a file for these bytes of tensors, of a pickle that may grow a little, and of a share."""
    return HEADER_BYTES + tensors + pickled + pickled // 4 + HEADER_BYTES + share


def share_start(tensors: int, pickled: int) -> int:
    """Return where in the file the share begins, behind the bytes of the tensors and of the pickle."""
    return round_up(HEADER_BYTES + tensors + pickled)


def share_of(total: int, index: int, sharers: int) -> range:
    """Return which bytes of the shared tensors are in one sharer's part. `index`: the sharer, counted from 0 on."""
    each = round_up(-(-total // sharers)) if sharers else 0
    return range(min(total, index * each), min(total, (index + 1) * each))


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
        return HeldCommit(
            rank=numbers[_RANK],
            world_size=numbers[_WORLD_SIZE],
            commit=commit,
            replicated=bool(numbers[_REPLICATED]),
            first_sharer=numbers[_FIRST_SHARER],
            sharers=numbers[_SHARERS],
            digest=numbers[_DIGEST],
            light=bool(numbers[_LIGHT]),
        )

    @property
    def is_kept(self) -> bool:
        """Whether the commit is to be copied to another host."""
        return bool(self._numbers[_KEPT])

    def set_outcome(self, state: WriteState, outcome: str) -> None:
        """Say what became of writing the buffer to disk."""
        # A path may have bytes that are not UTF-8, which Python shows as surrogates.
        text = outcome.encode(errors="backslashreplace")[: HEADER_BYTES - _OUTCOME - 1] + b"\0"
        with self._numbers.cast("B") as memory:
            memory[_OUTCOME : _OUTCOME + len(text)] = text
        self._numbers[_WRITE] = state

    def unseal(self) -> None:
        """Invalidate what the buffer has."""
        self._numbers[_SEALED] = 0

    def seal(
        self,
        held: HeldCommit,
        *,
        tensors: int,
        pickled: int,
        token: int = 0,
        write: WriteState = WriteState.NONE,
        kept: bool = False,
        interval: int = 1,
        shared: int = 0,
    ) -> None:
        """Declare that the buffer has this commit, whole. `tensors`, `pickled` and `shared` are numbers of bytes."""
        commit = held.commit
        what = (held.world_size, held.rank, tensors, pickled, held.replicated, token, write, kept, interval)
        sharing = (held.first_sharer, held.sharers, held.digest, shared, held.light)
        values = (_VERSION, 0, commit.attempt, commit.steps, *what, *sharing)
        for field, value in zip(range(_FIELDS), values, strict=True):
            self._numbers[field] = value
        self._numbers[_SEALED] = 1

    @property
    def token(self) -> int:
        """The random number of the attempt that has written it."""
        return self._numbers[_TOKEN]

    @property
    def interval(self) -> int:
        """After how many steps the next commit was to follow."""
        return max(1, self._numbers[_INTERVAL])

    @property
    def write_state(self) -> WriteState:
        """What became of writing it to disk."""
        return WriteState(self._numbers[_WRITE])

    @property
    def outcome(self) -> str:
        """What became of writing it, in words; `""`: there is nothing to say."""
        return bytes(self._numbers.cast("B")[_OUTCOME:]).partition(b"\0")[0].decode(errors="replace")

    def close(self) -> None:
        """Give the memory free, which can be unmapped then."""
        self._numbers.release()

    def sizes(self) -> tuple[int, int]:
        """Return the numbers of bytes of the tensors and of the pickle."""
        return self._numbers[_TENSOR_BYTES], self._numbers[_PICKLE_BYTES]

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of all shared tensors."""
        return self._numbers[_SHARED_BYTES]

    def share(self) -> tuple[int, range]:
        """Return where in the file the rank's share begins, and which bytes of the shared tensors it has.

        Raises ValueError where the header is damaged.
        """
        tensors, pickled = self.sizes()
        first, sharers, rank = self._numbers[_FIRST_SHARER], self._numbers[_SHARERS], self._numbers[_RANK]
        if min(tensors, pickled, self.shared_bytes, sharers) < 0 or (sharers and not 0 <= rank - first < sharers):
            msg = "the header of the buffer is damaged"
            raise ValueError(msg)
        share = range(0) if self._numbers[_LIGHT] else share_of(self.shared_bytes, rank - first, sharers)
        return share_start(tensors, pickled), share

    def part_bytes(self) -> int:
        """Return how many bytes of the file the part has. Raises ValueError where the header is damaged."""
        start, share = self.share()
        return start + len(share) if share else HEADER_BYTES + sum(self.sizes())


class CommitBuffer:
    """A buffer in the worker: the header and all that is behind it."""

    def __init__(self, fd: int) -> None:
        """Map the file, and close the descriptor. Raises OSError."""
        try:
            self.size = os.fstat(fd).st_size
            self._memory = shared_page.map_file(fd, self.size)
        finally:
            os.close(fd)
        self._is_filled = False
        self._view = memoryview(self._memory).cast("B")
        self.header = CommitHeader(self._view)

    @property
    def memory(self) -> Any:
        """The whole buffer as ctypes has it, from which torch makes a tensor. All its pages are mapped."""
        if not self._is_filled:
            self._is_filled = True
            shared_page.fill_page_table(self._memory)
        return self._memory

    def write_pickle(self, pickled: bytes, *, tensors: int) -> None:
        """Write the pickle behind the tensors. `tensors`: their bytes."""
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
    """Round a file's size up to whole pages."""
    return round_up(size, mmap.PAGESIZE)
