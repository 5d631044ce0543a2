"""A fork of the fork server that has imported more: what it learned from the script. It forks workers in its stead.

They become children of the fork server, to whom it makes no difference who forked them. If the understudy dies,
nothing is lost but time.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from raylaunch.node import processes, wire
from raylaunch.node.lesson import Lesson
from raylaunch.node.rehearsal import UnfitError, rehearse
from raylaunch.worker import boot
from raylaunch.worker.spec import WorkerSpec

_OPEN = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
_WORTH = 0.1
"""Seconds of work: less is imported by each worker itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """Import this."""

    lesson: Lesson
    in_a_hurry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Fork these workers, who wait for a byte from the pipe that comes beside this before they begin.

    `files`: those of each worker, as numbers of the fork server's own.
    """

    workers: tuple[WorkerSpec, ...]
    files: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReserve:
    """Fork a reserve of the fork server, which then has all that is learned (see `reserve`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begins:
    """The import of this module begins. If this is the last word, it was the end of the process."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """A module that cannot be imported ahead; `why` follows its name. The understudy ends."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Everything is imported, and nothing else has come of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotWorth:
    """It takes so little time that nobody need be there for it. The understudy ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The workers' process ids, in their order; or the reserve's, and the other end of its line beside this."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAway:
    """They are children of the fork server."""


Role = Callable[[], "int | Role"]
"""What a forked child does instead of serving; it runs at the bottom of the stack, so that the interpreter's own
exit (atexit, threads, buffers) comes after it. It may fork another that has a role."""


class Understudy:
    """The process."""

    def __init__(
        self, orders: socket.socket, server: int, be_reserve: Callable[[socket.socket, Lesson | None], int | Role]
    ) -> None:
        self._orders = orders
        self._server = server
        self._reserves_part = be_reserve
        self._output = (os.dup(1), os.dup(2))
        self._lesson: Lesson | None = None
        self._worth = False

    def serve(self) -> Role:
        """Until the fork server is gone. Returns in a worker: its role."""
        _be_silent()
        try:
            while True:
                order, gate = wire.receive(self._orders)
                if isinstance(order, Learn):
                    self._learn(order)
                    continue
                role = self._fork(order, gate) if isinstance(order, Fork) else self._fork_reserve()
                if role is not None:
                    return role
        except (EOFError, OSError):
            os._exit(0)  # without what the imported modules want to be done at exit

    def _say(self, word: object, fd: int | None = None) -> None:
        wire.send(self._orders, word, fd=fd)

    def _learn(self, order: Learn) -> None:
        try:
            seconds = rehearse(order.lesson, lambda name: self._say(Begins(name=name)), in_a_hurry=order.in_a_hurry)
        except UnfitError as error:
            for pid in processes.children():
                processes.kill_tree(pid)
            self._say(Unfit(name=error.name, why=error.why))
            os._exit(0)
        self._worth |= seconds >= _WORTH
        if not self._worth:
            self._say(NotWorth())
            os._exit(0)
        processes.get_ready_to_fork()
        self._lesson = order.lesson
        self._say(Learned())

    def _fork(self, order: Fork, gate: int | None) -> Role | None:
        assert gate is not None
        workers = zip(order.workers, order.files, strict=True)
        role = self._give_away([partial(self._be_worker, spec, files, gate) for spec, files in workers])
        if role is None:
            os.close(gate)
        return role

    def _fork_reserve(self) -> Role | None:
        ours, supervisors = wire.pair()
        with supervisors:
            role = self._give_away([partial(self._be_reserve, ours)], supervisors.fileno())
        if role is None:
            ours.close()
        return role

    def _give_away(self, roles: Sequence[Role], fd: int | None = None) -> Role | None:
        """Fork these by way of a child that ends at once, so that its children become the fork server's."""
        between = os.fork()
        if between == 0:
            pids = []
            for role in roles:
                pid = os.fork()
                if pid == 0:
                    return role
                pids.append(pid)
            self._say(Forked(pids=tuple(pids)), fd)
            os._exit(0)
        os.waitpid(between, 0)
        self._say(GivenAway())
        return None

    def _be_reserve(self, line: socket.socket) -> int | Role:
        for fd, kept in enumerate(self._output, start=1):
            os.dup2(kept, fd)
        return self._reserves_part(line, self._lesson)

    def _be_worker(self, spec: WorkerSpec, numbers: tuple[int, ...], gate: int) -> int:
        self._orders.detach()
        if not os.read(gate, 1):
            os._exit(1)
        report, stacks, notes = (os.open(f"/proc/{self._server}/fd/{number}", _OPEN) for number in numbers)
        return boot.live(spec, report, stacks, notes, self._server, boot.run)


def _be_silent() -> None:
    """What imports print, the script's own first import of the same has printed into its log."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
