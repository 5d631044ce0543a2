"""The fork server's end of the line to its understudy."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from raylaunch.node import processes, understudy, wire
from raylaunch.node.lesson import Lesson
from raylaunch.worker.spec import WorkerSpec

_FORK_SECONDS = 5.0
"""How long it may take to fork the workers."""

Word = understudy.Unfit | understudy.NotWorth | understudy.Learned


class Births:
    """Workers that are there, and wait for a word before they begin."""

    def __init__(self, pids: tuple[int, ...], start: int) -> None:
        self.pids = pids
        self._start = start

    def begin(self) -> None:
        """Let them."""
        os.write(self._start, b"." * len(self.pids))
        os.close(self._start)


class Standby:
    """No understudy, or one that learns, or one that is ready."""

    def __init__(self) -> None:
        self.pid = 0
        self.is_learning = False
        self._line: socket.socket | None = None
        self._readable = select.epoll()
        self._can_fork = False
        self._importing = ""

    def fileno(self) -> int:
        """Readable when `hear` has something."""
        return self._readable.fileno()

    @property
    def is_there(self) -> bool:
        """Whether there is one, or is about to be."""
        return self._line is not None

    @property
    def is_ready(self) -> bool:
        """Whether it has learned all that it was told."""
        return self._line is not None and not self.is_learning and self._can_fork

    def open(self) -> socket.socket:
        """Its own end of the line, for one that is about to be forked."""
        self._line, theirs = wire.pair()
        self._readable.register(self._line, select.EPOLLIN)
        return theirs

    def teach(self, lesson: Lesson, *, in_a_hurry: bool) -> None:
        """It says so when it is done."""
        assert self._line is not None
        self.is_learning = True
        with contextlib.suppress(OSError):  # gone: `hear` finds out
            wire.send(self._line, understudy.Learn(lesson=lesson, in_a_hurry=in_a_hurry))

    def hear(self) -> Word | None:
        """What it has said. Where it ended without a word, it is what it was importing that ended it."""
        while self._line is not None and wire.is_readable(self._line):
            try:
                word, _ = wire.receive(self._line)
            except (EOFError, OSError):
                culprit = self._importing if self.is_learning else ""
                self.dismiss()
                return understudy.Unfit(name=culprit, why="ends the process")
            if isinstance(word, understudy.Begins):
                self._importing = word.name
                continue
            if isinstance(word, understudy.Learned):
                self.is_learning, self._can_fork = False, True
            else:
                self.dismiss()
            assert isinstance(word, Word)
            return word
        return None

    def dismiss(self) -> None:
        """End it, if there is one."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self.pid:
            processes.kill_tree(self.pid)
        self.pid = 0
        self.is_learning = self._can_fork = False
        self._importing = ""

    def leave(self) -> None:
        """In a child, which has nothing to do with it: what is ours goes on."""
        if self._line is not None:
            self._line.close()
        self._readable.close()

    def fork(self, workers: tuple[WorkerSpec, ...], files: list[tuple[int, ...]]) -> Births | None:
        """Have it fork the workers. None: there is none, or it is not ready, or it fails."""
        if not self.is_ready:
            return None
        gate, start = os.pipe()
        forked = self._have(understudy.Fork(workers=workers, files=tuple(files)), gate)
        os.close(gate)
        if forked is not None:
            return Births(forked[0].pids, start)
        os.close(start)  # which ends those that are there
        self.dismiss()
        return None

    def fork_reserve(self) -> tuple[int, int] | None:
        """Have it fork a reserve: its process id, and the other end of its line. None: as above."""
        if not self.is_ready:
            return None
        forked = self._have(understudy.ForkReserve())
        if forked is not None and forked[1] is not None:
            return forked[0].pids[0], forked[1]
        self.dismiss()
        return None

    def _have(
        self, order: understudy.Fork | understudy.ForkReserve, fd: int | None = None
    ) -> tuple[understudy.Forked, int | None] | None:
        assert self._line is not None
        try:
            self._line.settimeout(_FORK_SECONDS)
            wire.send(self._line, order, fd=fd)
            forked, found = wire.receive(self._line)
            given_away, _ = wire.receive(self._line)
            self._line.settimeout(None)
        except (EOFError, OSError):
            return None
        is_done = isinstance(forked, understudy.Forked) and isinstance(given_away, understudy.GivenAway)
        return (forked, found) if is_done else None
