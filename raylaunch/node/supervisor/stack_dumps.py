"""Stack dumps of all workers of a node at one moment: what they wrote into their files, as far as they could."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raylaunch.core.failures.stacks import Stack
from raylaunch.core.newtypes import NodeId
from raylaunch.node.linux import procfs
from raylaunch.node.protocol.forkserver_messages import StackDumpStarted
from raylaunch.node.protocol.messages import StacksDumped
from raylaunch.worker.runtime.stack_signal import STACK_SIGNAL

POLL_SECONDS = 0.02
MOST_SECONDS = 0.5
_MOST_BYTES = 64 * 1024
"""Of one worker: the last ones, since faulthandler writes the main thread last."""
_STOPPED = ("T", "t", "Z", procfs.GONE)
"""Process states (proc(5)) in which no signal handler runs."""


@dataclass(slots=True)
class PendingDump:
    """One worker's dump. `fd` is its file, once the fork server has signalled it; -1 before."""

    rank: int
    pid: int
    fd: int = -1
    start: int = 0
    size: int = 0
    is_signalled: bool = True
    is_closed: bool = False
    done: bool = False

    def poll(self) -> None:
        """Find out whether the dump is complete: it has not grown since the last call, and the handler has returned."""
        if not self.is_signalled or procfs.process_state(self.pid) in _STOPPED:
            self.done = True
        elif self.fd >= 0:
            before, self.size = self.size, os.fstat(self.fd).st_size
            self.done = self.start < self.size == before and not procfs.blocks(self.pid, STACK_SIGNAL)

    def stack(self) -> Stack:
        return Stack(
            rank=self.rank,
            state=procfs.process_state(self.pid),
            text=self._text(),
            effort=procfs.resource_usage(self.pid),
            child_stopped=procfs.has_stopped_child(self.pid),
            file_closed=self.is_closed,
        )

    def _text(self) -> str:
        if self.fd < 0:
            return ""
        size = os.fstat(self.fd).st_size
        start = max(self.start, size - _MOST_BYTES)
        return os.pread(self.fd, size - start, start).decode(errors="replace")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StackDumps:
    """At most one dump of all workers at a time."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._attempt: int | None = None
        self._dumps: dict[int, PendingDump] = {}
        self._until = 0.0
        self._poll_at = 0.0

    def start(self, attempt: int, live: Sequence[tuple[int, int, int]]) -> None:
        """Expect dumps of these workers: (local rank, rank, process id). `poll` returns them."""
        self.close()
        self._attempt = attempt
        self._dumps = {rank: PendingDump(rank, pid) for _, rank, pid in live}
        self._poll_at = time.monotonic()
        self._until = self._poll_at + MOST_SECONDS

    def add_file(self, event: StackDumpStarted, fd: int | None) -> None:
        """Take over the file into which a worker was told to write."""
        if fd is None:
            return
        dump = self._dumps.get(event.rank)
        if dump is None or event.attempt != self._attempt or dump.fd >= 0:
            os.close(fd)
            return
        dump.fd, dump.start = fd, event.start
        dump.is_signalled, dump.is_closed = event.is_signalled, event.is_closed

    @property
    def is_open(self) -> bool:
        """Whether there is something to poll for."""
        return self._attempt is not None

    def poll(self) -> StacksDumped | None:
        """Return all stacks once: when all dumps are complete, or after half a second."""
        attempt, now = self._attempt, time.monotonic()
        if attempt is None or now < self._poll_at:
            return None
        self._poll_at = now + POLL_SECONDS
        for dump in self._dumps.values():
            dump.poll()
        if now < self._until and not all(dump.done for dump in self._dumps.values()):
            return None
        stacks = tuple(dump.stack() for dump in self._dumps.values())
        self.close()
        return StacksDumped(node=self._node, attempt=attempt, stacks=stacks)

    def close(self) -> None:
        """Close all files, and expect nothing more."""
        for dump in self._dumps.values():
            dump.close()
        self._attempt, self._dumps = None, {}
