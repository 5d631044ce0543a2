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

from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.state import commit_buffer
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
    """The buffers of this rank."""

    def __init__(self, folder: DurableFolder) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        atexit.register(self.write_last)

    def ask(self, request: Request) -> tuple[int | None, str]:
        """Do what the agent would do. Raises MemoryError."""
        index = request.index
        if request.bytes:
            try:
                if index not in self._files:
                    self._files[index] = os.memfd_create("raylaunch-state", os.MFD_CLOEXEC)
                os.ftruncate(self._files[index], max(request.bytes, os.fstat(self._files[index]).st_size))
            except OSError as error:
                raise MemoryError(f"the buffers of `State`: {error}") from error
        if request.write:
            self._thread = threading.Thread(target=self._write, name="raylaunch-checkpoint")
            self._thread.start()
        fd = self._files.get(index)
        return (os.dup(fd) if fd is not None else None), ""

    def _write(self) -> None:
        fd = self._files[DURABLE_BUFFER]
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        buffer = CommitBuffer(os.dup(fd))
        failed = checkpoint_writer.report(
            lambda: checkpoint_writer.write_checkpoint(self._folder, [buffer], _SECONDS),
            self._folder,
            buffer.header.held(),
        )
        commit_buffer.set_outcome(fd, WriteState.FAILED if failed else WriteState.WRITTEN, failed)

    def write_last(self) -> None:
        """Write the newest commit that all ranks have; a message where that fails. Only in the process itself."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._thread.join()
        buffers = [CommitBuffer(os.dup(fd)) for fd in self._files.values()]
        failed = checkpoint_writer.report(
            lambda: checkpoint_writer.write_newest(self._folder, buffers, _END_SECONDS), self._folder, None
        )
        if failed:
            print(f"raylaunch: {failed}", file=sys.stderr, flush=True)
