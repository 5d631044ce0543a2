"""The door of a warm driver: commands come, ask, hand over runs and signals. In a thread: the main thread runs jobs."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from raylaunch.cli import warm_folder, warm_words
from raylaunch.cli.warm_words import Exited, Run, Signalled, State, Stream
from raylaunch.node import wire

_LAST_WORDS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")
"""What the run of a command that is gone gets: the first of these that ends it."""
_PATIENCE = 0.1
"""For somebody who was let in at the last moment."""


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    """A command, and what it has handed over."""

    line: socket.socket
    streams: dict[int, int] = field(default_factory=dict)
    """Files by the numbers that they are to have."""
    run: Run | None = None
    gone: bool = False

    def say(self, message: Any) -> None:
        """Or not, if it is gone."""
        with contextlib.suppress(OSError):
            wire.send(self.line, message)


class Door:
    """One command at a time has the driver, from the word `FREE` to the end of its run; others hear `BUSY`."""

    def __init__(self, server: socket.socket, first: socket.socket, state: Callable[[], State]) -> None:
        """`first`: the line to the command that started this driver, and has it from the beginning."""
        self._server = server
        self._state = state
        self._selector = selectors.DefaultSelector()
        self._handed_over: queue.SimpleQueue[Caller | None] = queue.SimpleQueue()
        #: Guards the three below, and that signals come only to a run.
        self._lock = threading.Lock()
        self._guest: Caller | None = Caller(line=first)
        self._has_begun = False
        self._ends = False
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(first, selectors.EVENT_READ, self._guest)
        threading.Thread(target=self._listen, daemon=True, name="raylaunch-door").start()

    # For the main thread.

    def wait(self, seconds: float) -> Caller | None:
        """The next command with a run. None: none came in that time, or the driver is to end; none is let in then."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            with contextlib.suppress(queue.Empty):
                caller = self._handed_over.get(timeout=max(left, _PATIENCE))
                if caller is not None:
                    return caller
            with self._lock:
                if self._guest is None and (self._ends or time.monotonic() >= until):
                    self._ends = True
                    return None

    def begin(self) -> bool:
        """Whether the command is still there. Then its signals come from here on: to be called when they may."""
        with self._lock:
            assert self._guest is not None, "a run has a command"
            self._has_begun = not self._guest.gone
            if self._has_begun:
                self._guest.say(warm_words.TAKEN)
            return self._has_begun

    def finish(self, code: int, leave: Callable[[], None], *, stays: bool) -> None:
        """The run is over. No signals come any more when `leave` is called, which is before the command is told."""
        with self._lock:
            self._has_begun = False
            self._ends |= not stays
            leave()
            guest, self._guest = self._guest, None
        if guest is not None:
            guest.say(Exited(code=code))

    # In the thread.

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    with contextlib.suppress(OSError):
                        self._welcome(self._server.accept()[0])
                else:
                    self._hear(key.data)

    def _welcome(self, line: socket.socket) -> None:
        if warm_folder.is_ours(line):
            self._selector.register(line, selectors.EVENT_READ, Caller(line=line))
        else:
            line.close()

    def _hear(self, caller: Caller) -> None:
        try:
            message, fd = wire.receive(caller.line)
            if isinstance(message, Stream) and fd is not None:
                caller.streams[message.number], fd = fd, None
            if fd is not None:
                os.close(fd)
            self._answer(caller, message)
        except Exception:  # noqa: BLE001
            self._part(caller)  # it is gone, or of another version

    def _answer(self, caller: Caller, message: Any) -> None:
        match message:
            case warm_words.KNOCK:
                caller.say(warm_words.FREE if self._let_in(caller) else warm_words.BUSY)
            case Run() if caller is self._guest and caller.run is None:
                caller.run = message
                self._handed_over.put(caller)
            case Signalled():
                self._signal(caller, message.signal)
            case warm_words.STATE:
                caller.say(asdict(self._state()))
            case warm_words.END:
                with self._lock:
                    self._ends = True
                caller.say(asdict(self._state()))
                self._handed_over.put(None)
            case _:
                pass

    def _let_in(self, caller: Caller) -> bool:
        with self._lock:
            is_free = self._guest is None and not self._ends
            if is_free:
                self._guest = caller
            return is_free

    def _part(self, caller: Caller) -> None:
        self._selector.unregister(caller.line)
        caller.gone = True
        caller.line.close()
        if caller.run is not None:
            self._end_run(caller)
            return
        for fd in caller.streams.values():
            os.close(fd)
        with self._lock:
            if caller is self._guest:  # it was let in and changed its mind
                self._guest = None

    def _end_run(self, caller: Caller) -> None:
        """Nobody is there to hear what becomes of it: it ends as by a signal to its command."""
        assert caller.run is not None
        ends_it = set(caller.run.job.signals_to_handle).difference(caller.run.ignored)
        self._signal(caller, next((name for name in _LAST_WORDS if name in ends_it), "SIGKILL"))

    def _signal(self, caller: Caller, name: str) -> None:
        with self._lock:
            if caller is self._guest and self._has_begun:
                os.kill(os.getpid(), signal.Signals[name])
