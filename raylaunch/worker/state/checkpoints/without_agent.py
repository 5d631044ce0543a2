"""What takes the place of the agent where there is none, as under torchrun: memory of this process, and threads.

The memory ends with the process. What is in it at a planned end, and each commit that is for the disk, is written by
threads of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

from raylaunch.core.machine.commits import Commit
from raylaunch.worker.descriptors import Identity, identity, is_still
from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.checkpoints import checkpoint_writer
from raylaunch.worker.state.checkpoints.durable_folder import LOW_PRIORITY, DurableFolder
from raylaunch.worker.state.commit_buffer import DURABLE_BUFFER, CommitBuffer, WriteState

_SECONDS = 600.0
"""How long to wait for what other ranks write."""
_END_SECONDS = 60.0
"""The same at the end of the process."""


def heartbeats() -> HeartbeatWriter:
    """Return a writer of heartbeats that nobody reads."""
    numbers = memoryview(bytearray(shared_page.PAGE_BYTES)).cast("q")
    return HeartbeatWriter(numbers, shared_page.slot_offset(0))


class OwnFiles:
    """The buffers of this rank, in memory of this process."""

    def __init__(self, folder: DurableFolder) -> None:
        self._folder = folder
        #: The descriptor of each buffer's file, and what it is of: the script may close it, and reuse the number.
        self._files: dict[int, tuple[int, Identity]] = {}
        #: The same buffers, mapped into this process.
        self._buffers: dict[int, CommitBuffer] = {}
        self._thread: threading.Thread | None = None
        self._written: Commit | None = None
        #: Why the last commit for the disk could not be written, for a person; "": it could.
        self._failed = ""
        self._pid = os.getpid()
        atexit.register(self.write_last)

    def ask(self, request: Request) -> tuple[int | None, str]:
        """Do what the agent would do. Raises MemoryError."""
        index = request.index
        if request.bytes:
            try:
                self._enlarge(index, request.bytes)
            except OSError as error:
                raise MemoryError(f"the buffers of `State`: {error}") from error
        if request.write:
            self._thread = threading.Thread(target=self._write, name="raylaunch-checkpoint")
            self._thread.start()
        fd = self._fd(index)
        return (os.dup(fd) if fd is not None else None), ""

    def _fd(self, index: int) -> int | None:
        """Return the descriptor of a buffer's file; None: there is none any more."""
        fd, known = self._files.get(index, (-1, (0, 0)))
        return fd if is_still(fd, known) else None

    def _enlarge(self, index: int, size: int) -> None:
        fd = self._fd(index)
        if fd is None:
            fd = os.memfd_create("raylaunch-state", os.MFD_CLOEXEC)
            self._files[index] = fd, identity(fd)
        os.ftruncate(fd, max(size, os.fstat(fd).st_size))
        self._buffers[index] = CommitBuffer(os.dup(fd))

    def _write(self) -> None:
        buffer = self._buffers[DURABLE_BUFFER]
        held = buffer.header.held()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        self._failed = checkpoint_writer.report(
            lambda: checkpoint_writer.write_checkpoint(self._folder, [buffer], _SECONDS),
            self._folder,
            held,
        )
        if held is not None and not self._failed:
            self._written = held.commit
        buffer.header.set_outcome(WriteState.FAILED if self._failed else WriteState.WRITTEN, self._failed)

    def write_last(self) -> None:
        """Write the newest commit that all ranks have and that is not written; a message where that fails.

        It does that only in the process itself. What this rank has written is left alone: others may be at work on
        their parts of it, and rank 0 about to complete it.
        """
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._thread.join()
        buffers = [buffer for buffer in self._buffers.values() if self._is_newer(buffer)]
        failed = checkpoint_writer.report(
            lambda: checkpoint_writer.write_newest(self._folder, buffers, _END_SECONDS), self._folder, None
        )
        for why in filter(None, (self._failed, failed) if failed else ()):  # the first may be the cause of the second
            print(f"raylaunch: {why}", file=sys.stderr, flush=True)

    def _is_newer(self, buffer: CommitBuffer) -> bool:
        """Return whether a buffer has a commit after the last one that this rank has written."""
        held = buffer.header.held()
        return held is not None and (self._written is None or held.commit > self._written)
