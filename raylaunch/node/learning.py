"""`preload: auto` as the fork server does it: reads what workers import, and has an understudy import it meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from raylaunch.node import lesson, messages, understudy, wire
from raylaunch.node.lesson import Lesson
from raylaunch.node.standby import Births, Standby
from raylaunch.worker import imports
from raylaunch.worker.spec import WorkerSpec

_QUIET = 2.0
"""Seconds without an import after which the script is taken to be past its beginning."""
_SELDOM = 600.0
"""At most so many seconds lie between looks; each that finds nothing doubles them."""
_MOST_FORKS = 10
"""Understudies for a script: each but the last names a module that the next one leaves out."""
_HURRY_SECONDS = 60.0
"""How long workers wait for an understudy that only imports again what one that is gone had imported."""


@dataclass(slots=True)
class _Notes:
    """What the workers of an attempt write; how much of it was there at the last look, and how much is read."""

    file: int
    nproc: int
    seen: int = 0
    read: int = 0


class Learning:
    """What is learned of the present script. `say` tells the supervisor; `taught` is what we have imported already."""

    def __init__(self, begin: messages.Begin, say: Callable[[messages.Word], None], taught: Lesson | None) -> None:
        self.standby = Standby()
        self._wanted = begin.learn
        self._say = say
        self._lesson = self._told = begin.lesson or Lesson(entry=())
        #: What an understudy has imported, and no harm was done.
        self._proven = begin.lesson
        #: Modules that spoil a process, and those in them.
        self._left_out: set[str] = set()
        #: There is something to learn that no understudy was told.
        self._news = begin.lesson is not None and begin.lesson != taught
        self._forks = 0
        #: Of the present attempt, and of the one before if nobody has read it yet.
        self._notes: list[_Notes] = []
        self._look_at: float | None = None
        self._look_in = _QUIET
        self._hurry_until = time.monotonic() + _HURRY_SECONDS if self._news else 0.0

    @property
    def holds_up(self) -> bool:
        """Whether the next attempt had better wait for the understudy."""
        return time.monotonic() < self._hurry_until

    @property
    def known(self) -> Lesson | None:
        """What the understudy has imported, if it can fork."""
        return self._proven if self.standby.is_ready else None

    def until_look(self) -> float | None:
        """Seconds until `turn` has something to do by itself."""
        times = [at for at in (self._look_at, self._hurry_until) if at]
        return min(times) - time.monotonic() if times else None

    def attempt(self, workers: Sequence[WorkerSpec]) -> int:
        """An attempt is about to begin; the file for its notes, -1 where none are wanted."""
        self._hurry_until = 0.0
        self._look_at = None
        self._forget(self._notes[:-1] + [notes for notes in self._notes[-1:] if notes.read == _size(notes)])
        if not self._wanted or not workers or workers[0].kind == "command":
            return -1
        entry = lesson.entry(workers[0])
        if self._lesson.entry != entry:  # what was learned of another script may be wrong for this one
            self.standby.dismiss()
            self._forget(list(self._notes))
            self._lesson, self._proven, self._left_out, self._forks = Lesson(entry=entry), None, set(), 0
        self._lesson = replace(self._lesson, apart=self._lesson.apart | lesson.apart(workers))
        self._notes.append(_Notes(wire.memory_file("raylaunch-imports"), len(workers)))
        self._look_in = _QUIET
        self._look_at = time.monotonic() + _QUIET
        return self._notes[-1].file

    def _forget(self, notes: list[_Notes]) -> None:
        for one in notes:
            os.close(one.file)
            self._notes.remove(one)

    def turn(self) -> socket.socket | None:
        """Listen to the understudy, and look whether there is more to learn, if it is time.

        Gives the end of a line for an understudy that is to be forked.
        """
        while (word := self.standby.hear()) is not None:
            self._take(word)
        if not self.holds_up:
            self._hurry_until = 0.0
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look()
        if not self._news or self.standby.is_learning:
            return None
        return self._teach()

    def _look(self) -> None:
        grows = False
        for notes in self._notes:
            size = _size(notes)
            grows |= size != notes.seen
            notes.seen = size
        if not grows:
            for notes in self._notes:
                self._read(notes)
            self._forget(self._notes[:-1])
        self._look_in = _QUIET if grows else min(2 * self._look_in, _SELDOM)
        self._look_at = time.monotonic() + self._look_in

    def _read(self, notes: _Notes) -> None:
        if notes.read == notes.seen:
            return
        found = list(imports.read(os.pread(notes.file, notes.seen, 0)))
        before, self._lesson = self._lesson, lesson.grown(self._lesson, found, notes.nproc)
        self._news |= before.parts != self._lesson.parts
        notes.read = notes.seen

    def _teach(self) -> socket.socket | None:
        self._news = False
        self._told = self._lesson.without(self._left_out)
        if not self._told.parts:
            return None
        theirs = None
        if not self.standby.is_there:
            if self._forks == _MOST_FORKS:
                return None
            self._forks += 1
            theirs = self.standby.open()
        self.standby.teach(self._told, in_a_hurry=self.holds_up)
        return theirs

    def _take(self, word: understudy.Unfit | understudy.NotWorth | understudy.Learned) -> None:
        match word:
            case understudy.Learned():
                self._hurry_until = 0.0
                self._proven = self._told
                self._tell("")
            case understudy.NotWorth():
                self._hurry_until = 0.0  # and no other, until there is more
            case understudy.Unfit():
                self._news = True
                if word.name:
                    self._left_out.add(word.name)
                    self._tell(f"`{word.name}` is not preloaded: importing it {word.why}" if word.why else "")

    def _tell(self, why: str) -> None:
        proven = self._proven and self._proven.without(self._left_out)
        self._say(messages.Learned(lesson=proven, why=why))

    def fork(self, workers: tuple[WorkerSpec, ...], files: list[tuple[int, ...]]) -> Births | None:
        """Have the understudy fork them, if there is one that is ready."""
        with self._another_where_it_fails():
            return self.standby.fork(workers, files)

    def fork_reserve(self) -> tuple[int, int] | None:
        """Have the understudy fork a reserve of the fork server: its process id, and the other end of its line."""
        with self._another_where_it_fails():
            return self.standby.fork_reserve()

    @contextlib.contextmanager
    def _another_where_it_fails(self) -> Iterator[None]:
        was_there = self.standby.is_there
        yield
        self._news |= was_there and not self.standby.is_there


def _size(notes: _Notes) -> int:
    return os.fstat(notes.file).st_size
