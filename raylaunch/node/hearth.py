"""What may outlive a run on a node, for the next one: the fork server with all that it has imported.

With it go what it was told of at its start: the page of signs of life, the file timer's pipe, a temporary folder.
"""

from __future__ import annotations

import os
import select
import socket
import time
from dataclasses import replace
from typing import TypeVar

from raylaunch.node import messages, proc, processes, spool, timer, wire
from raylaunch.node.lesson import Lesson
from raylaunch.node.patience import WAIT_SECONDS
from raylaunch.node.server import Server
from raylaunch.node.settings import NodeSettings
from raylaunch.worker.page import Page

_CLEAR_SECONDS = 5.0
_WAKE_SECONDS = 5.0

Answer = TypeVar("Answer", messages.Rested, messages.Ready)


class Hearth:
    """One run at a time has it, or nobody."""

    def __init__(self, settings: NodeSettings) -> None:
        """For a run with these settings, and later ones that differ in nothing that a fork server is started with."""
        self.page, self._page_fd = Page.create()
        self._timer = timer.variables(settings.env)
        self._folder = "" if settings.kept else spool.name()
        self._server: Server | None = None
        #: The fork server's, once it was cleared.
        self.pid = 0
        #: What it said when it was woken, and nobody has heard yet.
        self.ready: messages.Ready | None = None
        #: What the fork server has learned, for another if it dies.
        self.lesson: Lesson | None = None
        #: Our end of the line to the fork server, while there is one; and to its reserve, while we know of one.
        self.control: socket.socket | None = None
        self._reserve: socket.socket | None = None
        self._begun: messages.Begin | None = None

    def settle(self, settings: NodeSettings) -> NodeSettings:
        """A run's settings with what is of this place."""
        return replace(
            settings,
            env=settings.env | self._timer,
            run_dir=self._folder or settings.run_dir,
            page=f"/proc/{os.getpid()}/fd/{self._page_fd}",
        )

    def start(self, settings: NodeSettings, preload: tuple[str, ...]) -> socket.socket:
        """Start a fork server, which says `Ready` when it has imported these. Raises OSError."""
        ours, theirs = wire.pair()
        with theirs:
            self._server = Server(settings, theirs)
        if self._folder:
            spool.make(self._folder)  # there is somebody by now who removes it
        self.control = ours
        self._begun = messages.Begin(
            preload=preload,
            start_method=settings.start_method,
            page=settings.page,
            learn=settings.learn,
            lesson=self.lesson,
        )
        wire.send(ours, self._begun)
        return ours

    def hear(self) -> tuple[messages.Word, int | None]:
        """The fork server's next word, with its file. What counts beyond this fork server is kept.

        Raises EOFError or OSError where it is gone.
        """
        assert self.control is not None
        word, fd = wire.receive(self.control)
        if isinstance(word, messages.Learned):
            self.lesson = word.lesson
        if isinstance(word, messages.Reserve):
            self._forget_reserve()
            self._reserve, fd = socket.socket(fileno=fd), None
        return word, fd

    def succeed(self) -> messages.Ready | None:
        """The fork server died: have its reserve take its place, when nothing else of it is left.

        Waits for that, for seconds at most. None: there is no reserve that does.
        """
        if self._reserve is None:
            return None
        assert self.control is not None and self._server is not None and self._begun is not None  # noqa: PT018
        self.control.close()
        self.control, self._reserve = self._reserve, None
        self._server.resume()
        return self._ask(replace(self._begun, lesson=self.lesson), messages.Ready, WAIT_SECONDS)

    def clear(self) -> bool:
        """End and forget all of a run. False: the fork server does not do so in time."""
        cleared = self._ask(messages.Rest(), messages.Rested, _CLEAR_SECONDS)
        if cleared is None:
            return False
        self.pid = cleared.pid
        if self._folder:
            spool.empty(self._folder)
        return True

    def memory(self) -> int:
        """Bytes that the fork server takes, with all that stands by beside it; 0: not known."""
        return sum(map(proc.memory, (self.pid, *processes.children(self.pid))))

    def wake(self) -> bool:
        """After `clear`: whether another run can begin. Waits for that, for seconds at most."""
        self.ready = self._ask(messages.Wake(), messages.Ready, _WAKE_SECONDS)
        return self.ready is not None

    def _ask(self, order: messages.Order, answer: type[Answer], seconds: float) -> Answer | None:
        """None: there is none in time. What else the fork server says is of a run that is over."""
        assert self.control is not None
        deadline = time.monotonic() + seconds
        try:
            wire.send(self.control, order)
            while select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                word, fd = self.hear()
                if fd is not None:
                    os.close(fd)
                if isinstance(word, answer):
                    return word
        except (EOFError, OSError, ValueError):
            pass  # the fork server is gone, or was given up meanwhile
        return None

    def put_out(self) -> None:
        """End the fork server and what it has started. Waits for that, for seconds at most."""
        self._forget_reserve()
        if self.control is not None:
            self.control.close()
            self.control = None
        if self._server is not None:
            self._server.end()
            self._server = None

    def _forget_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def close(self) -> None:
        """End it all."""
        self.put_out()
        self.page.close()
        os.close(self._page_fd)
        if self._folder:
            spool.remove(self._folder)
