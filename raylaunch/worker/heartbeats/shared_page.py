"""The shared page: memory that a node's agent, its fork server and its workers read and write without locks.

The page has a header, and a slot and notes for each local rank. Every field is an aligned 64-bit number that only one
process writes, so no read is ever torn. A field that holds a step holds it plus one; 0 says that there was none.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import Any, Final

PAGE_VARIABLE = "RAYLAUNCH_PAGE"
"""In a worker's environment: `PATH:LOCAL_RANK`. The path can be opened as long as the agent lives."""

MAX_NUMBER: Final = 1 << 62
"""Above what a field can hold, with a margin."""
MAX_WORKERS: Final = 1000
"""Workers of a node with a local rank from here on have no slot."""
_HEADER_FIELDS: Final = 16
_SLOT_FIELDS: Final = 16
_NOTE_FIELDS: Final = 1 + 2 * 4096
PAGE_BYTES: Final = 8 * (_HEADER_FIELDS + (_SLOT_FIELDS + _NOTE_FIELDS) * MAX_WORKERS)

LEASE_EXPIRES_AT: Final = 0
"""Header, written by the agent: `lease_clock` at which the node counts as lost, unless it is renewed; 0: no lease."""
ATTEMPT: Final = 1
"""Header, written by the fork server: the attempt whose workers have the slots."""
PROPOSED_STEP: Final = 2
"""Header, written by the agent: the step after which all ranks are to save, plus one; 0: none."""
COMMITTED_STEP: Final = 3
"""Header, written by the agent: PROPOSED_STEP, once it is known that no rank had passed that step."""
RESTORE_DECIDED: Final = 4
"""Header, written by the agent after the other RESTORE_* fields: the attempt for which they are valid."""
RESTORE_ATTEMPT: Final = 5
"""Header, written by the agent: the attempt in which the commit to restore was written; 0: there is none to restore."""
RESTORE_STEPS: Final = 6
"""Header, written by the agent: how many steps were completed in that commit."""
RESTORE_WORLD_SIZE: Final = 7
"""Header, written by the agent: how many ranks the world had in which that commit was written."""
KEPT_ATTEMPT: Final = 8
"""Header, written by the agent before RESTORE_DECIDED: the attempt of a commit not to overwrite for now; 0: none."""
KEPT_STEPS: Final = 9
"""Header, written by the agent: how many steps were completed in that commit."""
COPYING: Final = 10
"""Header, written by the agent: the attempt of which it copies commits to another host; 0: none."""
COPIED_STEPS: Final = 11
"""Header, written by the agent: how many steps were completed in that attempt's last commit that is copied; 0: none."""
AWAITS_COPY: Final = 12
"""Header, written by the agent before PROPOSED_STEP: 1 if what is committed after that step is to be copied first."""
FILES_READY: Final = 13
"""Header, written by the agent: the last attempt for which RAYLAUNCH_FAST_DIR has the files that it may lack."""

PROGRESS: Final = 0
"""Slot: the number of optimizer steps and heartbeats in the attempt."""
ALIVE_AT: Final = 1
"""Slot: CLOCK_MONOTONIC, in ns, of the last write."""
LAST_STEP: Final = 2
"""Slot: the last step that was done, by the script's own count, plus one."""
POLLED_STEP: Final = 3
"""Slot: the last step that `should_checkpoint` was called with, plus one."""
SAVED_STEP: Final = 4
"""Slot: the last step that `checkpointed` was called with, plus one."""
WAITING_FOR_STOP: Final = 5
"""Slot: 1 while the worker has nothing to save: it has saved as it was asked to, or waits for a call of its group."""
BUSY: Final = 6
"""Slot: how many reasons there are to expect no progress: open sections, a checkpoint, a captured CUDA graph."""
OWNER_PID: Final = 7
"""Slot: the process that writes it. That is the worker; for a `command`, the first process that uses the API."""
FIRST_PROGRESS_AT: Final = 8
"""Slot: CLOCK_MONOTONIC, in ns, of the attempt's first progress."""
FIRST_STEP: Final = 9
"""Slot: the first step that was done in the attempt, by the script's own count, plus one."""
COMMITTED_STATE: Final = 10
"""Slot: how many steps were completed in the last commit of `State`; 0: there was none in the attempt."""
COMMIT_EVERY: Final = 11
"""Slot: after how many steps `State` commits with `every="auto"`; 0: that is not known yet. Only rank 0 knows it."""
SAVE_NS: Final = 12
"""Slot: how long its last checkpoint or commit of `State` took, in ns; 0: that is not known."""
STEP_NS: Final = 13
"""Slot: how long a step takes without commits, in ns, as rank 0 has measured it."""

_NAME: Final = "raylaunch-page"
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ (madvise(2)), which Python 3.11's `mmap` does not have."""


def lease_clock() -> int:
    """Return CLOCK_BOOTTIME in ns. Unlike CLOCK_MONOTONIC it goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SharedPage:
    """The page, mapped into this process until it ends.

    `numbers` holds all fields: a header field is at its own index, a slot's field at `slot_offset(rank) + FIELD`.
    """

    def __init__(self, fd: int) -> None:
        self.numbers = memoryview(map_file(fd, PAGE_BYTES)).cast("B").cast("q")

    @classmethod
    def create(cls) -> tuple[SharedPage, int]:
        """Create a page of zeros; return it and the file descriptor by which other processes can open it."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd), fd

    @classmethod
    def open(cls, path: str) -> SharedPage:
        """Map the page of another process, `/proc/PID/fd/FD`. Raises OSError, also where that is something else."""
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise FileNotFoundError(errno.ENOENT, "there is no page", path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != PAGE_BYTES:
                raise OSError(errno.EINVAL, "the page is of another version", path)
            return cls(fd)
        finally:
            os.close(fd)

    def notes(self, local_rank: int) -> memoryview:
        """Return the fields for a worker's notes: how many it has made, and the last of them; see `output_order`."""
        start = _HEADER_FIELDS + _SLOT_FIELDS * MAX_WORKERS + _NOTE_FIELDS * local_rank
        return self.numbers[start : start + _NOTE_FIELDS]

    @property
    def lease_seconds_left(self) -> float | None:
        """The seconds until the node's lease expires; None: there is no lease."""
        until = self.numbers[LEASE_EXPIRES_AT]
        return (until - lease_clock()) / 1e9 if until else None

    @property
    def lease_has_expired(self) -> bool:
        """Whether the node's processes have to end: the driver is silent for too long."""
        left = self.lease_seconds_left
        return left is not None and left <= 0

    def renew_lease(self, until_ns: int) -> bool:
        """Let the lease expire at this time, 0: never. A lease that has expired stays so.

        Return whether that is earlier than before: the fork server may be sleeping until then.
        """
        present = self.numbers[LEASE_EXPIRES_AT]
        if self.lease_has_expired:
            return False
        self.numbers[LEASE_EXPIRES_AT] = until_ns
        return until_ns != 0 and (present == 0 or until_ns < present)

    def close(self) -> None:
        """Make `numbers` unusable. The memory stays mapped."""
        self.numbers.release()

    def reset(self, attempt: int, workers: int) -> None:
        """Clear the proposed step, and the slots and notes for the workers of a new attempt. The lease stays."""
        self.numbers[PROPOSED_STEP] = self.numbers[COMMITTED_STEP] = 0
        for index in range(_HEADER_FIELDS, _HEADER_FIELDS + _SLOT_FIELDS * min(workers, MAX_WORKERS)):
            self.numbers[index] = 0
        for local_rank in range(min(workers, MAX_WORKERS)):
            self.notes(local_rank)[0] = 0
        self.numbers[ATTEMPT] = attempt


def slot_offset(local_rank: int) -> int:
    """Return the index of the first field of a worker's slot."""
    return _HEADER_FIELDS + _SLOT_FIELDS * local_rank


def map_file(fd: int, size: int) -> Any:
    """Map the first `size` bytes of a file with mmap(2), for as long as this process lives; return a ctypes array.

    Raises OSError.

    Python's `mmap` would keep a duplicate of the descriptor, which a script that closes all files breaks: the number
    may then belong to another file, which `mmap` would close in the end.
    """
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    arguments = (ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    address = libc.mmap(None, *arguments)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return (ctypes.c_byte * size).from_address(address)


def fill_page_table(memory: Any) -> None:
    """Map all pages of what `map_file` has returned, which takes a tenth of the time of one page fault for each.

    That is madvise(MADV_POPULATE_READ), of Linux 5.14. Older kernels do nothing, and there will be page faults.
    """
    import ctypes  # noqa: PLC0415

    ctypes.CDLL(None).madvise(ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_size_t(len(memory)), _POPULATE_READ)
