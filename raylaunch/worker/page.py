"""The page of memory that a node's agent, fork server and workers share: signs of life one way, words the other.

Every field is an aligned 64-bit number that one side alone writes, so nothing is ever locked or torn. Steps are kept
plus one: 0 says that there was none.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import Final

VARIABLE = "RAYLAUNCH_PAGE"
"""In a worker's environment: `PATH:LOCAL_RANK`. The path is good as long as the agent lives."""

MOST_WORKERS: Final = 1000
_HEADER: Final = 8
_SLOT: Final = 16
_BYTES: Final = 8 * (_HEADER + _SLOT * MOST_WORKERS)

LEASE: Final = 0
"""Header, written by the agent: `lease_clock`, ns, at which the node counts as lost unless renewed; 0: none."""
ATTEMPT: Final = 1
"""Header, written by the fork server: the attempt that the slots are of."""
ASK: Final = 2
"""Header, written by the agent: the step at which all are to save, plus one; 0: none."""
SETTLED: Final = 3
"""Header, written by the agent: ASK, once it is known that no worker of any node had passed that step."""

MARKS: Final = 0
"""Slot: optimizer steps and heartbeats of the attempt."""
MARKED_AT: Final = 1
"""Slot: CLOCK_MONOTONIC, ns, of the last sign of life."""
STEP: Final = 2
"""Slot: the last step done by the script's own count, plus one."""
ASKED: Final = 3
"""Slot: the last step `should_checkpoint` was asked about, plus one."""
SAVED: Final = 4
"""Slot: the last step that `checkpointed` was told of, plus one."""
WAITING: Final = 5
"""Slot: 1 while the worker has saved what it was asked for, and waits for its end."""
BUSY: Final = 6
"""Slot: how many sections the worker is in where no sign of life is to be expected."""
OWNER: Final = 7
"""Slot: process id of the one process that writes it: the worker, or for a `command` the first one that asks."""
FIRST_AT: Final = 8
"""Slot: CLOCK_MONOTONIC, ns, of the attempt's first mark."""
FIRST_STEP: Final = 9
"""Slot: the first step that was done in the attempt, by the script's own count, plus one."""

_NAME: Final = "raylaunch-page"


def lease_clock() -> int:
    """CLOCK_BOOTTIME, ns: unlike CLOCK_MONOTONIC it goes on while the machine sleeps, as the driver's clock does."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Page:
    """The page, mapped for good. Indexing its `numbers` gives header fields; `slot` says where a worker's begin."""

    def __init__(self, fd: int) -> None:
        self.numbers = _mapped(fd)

    @classmethod
    def create(cls) -> tuple[Page, int]:
        """A fresh page, all zeros, and the file descriptor that keeps it reachable for others."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd), fd

    @classmethod
    def open(cls, path: str) -> Page:
        """The page of another process. Raises OSError, also where the path leads to something else."""
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise FileNotFoundError(errno.ENOENT, "there is no page", path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != _BYTES:
                raise OSError(errno.EINVAL, "the page is of another version", path)
            return cls(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let nobody read or write it any more by this."""
        self.numbers.release()

    def begin(self, attempt: int, workers: int) -> None:
        """A new attempt: nothing of the one before is left, neither signs of life nor words."""
        self.numbers[ASK] = self.numbers[SETTLED] = 0
        for index in range(_HEADER, _HEADER + _SLOT * min(workers, MOST_WORKERS)):
            self.numbers[index] = 0
        self.numbers[ATTEMPT] = attempt


def _mapped(fd: int) -> memoryview:
    """Without a file descriptor of its own, which `mmap` keeps and would close when it may be somebody else's."""
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    arguments = (ctypes.c_size_t(_BYTES), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    address = libc.mmap(None, *arguments)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview((ctypes.c_byte * _BYTES).from_address(address)).cast("B").cast("q")


def slot(local_rank: int) -> int:
    """Index of the worker's first field."""
    return _HEADER + _SLOT * local_rank
