"""Asking all workers of a node at once what they are doing, and collecting what those who can answer have written."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raylaunch.core.stacks import Stack
from raylaunch.node import messages, proc
from raylaunch.node.effort import child_stopped, effort
from raylaunch.worker.stacks import SIGNAL

LOOK_SECONDS = 0.02
_MOST_SECONDS = 0.5
_MOST_BYTES = 64 * 1024
"""Of one worker; the end of it, where the main thread is."""
_STOPPED = ("T", "t", "Z", proc.GONE)
"""States in which nobody answers."""


@dataclass(slots=True)
class _Asked:
    """One worker. `fd` is its file, once the fork server has passed the question on; -1 before."""

    rank: int
    pid: int
    fd: int = -1
    start: int = 0
    size: int = 0
    hears: bool = True
    done: bool = False

    def look(self) -> None:
        """See whether it has answered: what it wrote has not grown since the last look, and it writes no more."""
        if not self.hears or proc.state(self.pid) in _STOPPED:
            self.done = True
        elif self.fd >= 0:
            before, self.size = self.size, os.fstat(self.fd).st_size
            self.done = self.start < self.size == before and not proc.holds_back(self.pid, SIGNAL)

    def stack(self) -> Stack:
        return Stack(
            rank=self.rank,
            state=proc.state(self.pid),
            text=self._text(),
            effort=effort(self.pid),
            child_stopped=child_stopped(self.pid),
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


class Dumps:
    """At most one question at a time."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._attempt: int | None = None
        self._asked: dict[int, _Asked] = {}
        self._until = 0.0
        self._next = 0.0

    def ask(self, attempt: int, live: Sequence[tuple[int, int, int]]) -> None:
        """These (local rank, rank, process id) are asked. `look` gives the answer."""
        self.close()
        self._attempt = attempt
        self._asked = {rank: _Asked(rank, pid) for _, rank, pid in live}
        self._next = time.monotonic()
        self._until = self._next + _MOST_SECONDS

    def take(self, word: messages.Asked, fd: int | None) -> None:
        """A worker was asked."""
        if fd is None:
            return
        asked = self._asked.get(word.rank)
        if asked is None or word.attempt != self._attempt or asked.fd >= 0:
            os.close(fd)
            return
        asked.fd, asked.start, asked.hears = fd, word.start, word.hears

    @property
    def is_open(self) -> bool:
        """Whether there is something to look for."""
        return self._attempt is not None

    def look(self) -> messages.WorkersStacks | None:
        """The answer, once: when all have answered who can, or the time is over."""
        attempt, now = self._attempt, time.monotonic()
        if attempt is None or now < self._next:
            return None
        self._next = now + LOOK_SECONDS
        for asked in self._asked.values():
            asked.look()
        if now < self._until and not all(asked.done for asked in self._asked.values()):
            return None
        stacks = tuple(asked.stack() for asked in self._asked.values())
        self.close()
        return messages.WorkersStacks(node=self._node, attempt=attempt, stacks=stacks)

    def close(self) -> None:
        """Let go of all files."""
        for asked in self._asked.values():
            asked.close()
        self._attempt, self._asked = None, {}
