"""A run in place of another process: with its folder, environment, streams, umask and signals; and back again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

from raylaunch.cli.warm_words import Run

_REST_MASK = 0o077


class InPlace:
    """What this process has of a command while it runs something for it, and gives back."""

    def __init__(self, run: Run, streams: dict[int, int]) -> None:
        """`streams`: files by the number that they are to have; they are closed."""
        self._run = run
        self._streams = streams
        self._environ = dict(os.environ)
        names = {*run.job.signals_to_handle, *run.job.signals_to_forward} & signal.Signals.__members__.keys()
        self._signals = {name: signal.Signals[name] for name in names}

    def enter(self) -> None:
        """Raises OSError where the folder cannot be entered any more."""
        os.chdir(self._run.cwd)
        os.umask(self._run.umask)
        _set_environ(self._run.environ)
        for number, fd in self._streams.items():
            os.dup2(fd, number)
            os.close(fd)
        self._streams = {}
        for name, number in self._signals.items():
            signal.signal(number, self._disposition(name, number))

    def _disposition(self, name: str, number: signal.Signals) -> Any:
        """Until the run has its own: what Python begins with, but no death by a signal that is only passed on."""
        if name in self._run.ignored:
            return signal.SIG_IGN
        if name in self._run.job.signals_to_forward:
            return lambda *_: None
        return signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL

    def leave(self) -> None:
        """As it was before; what was printed is written."""
        for number in self._signals.values():
            signal.signal(number, signal.SIG_DFL)
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                file.flush()
        for fd in self._streams.values():
            os.close(fd)
        let_go_of_streams()
        for file in (sys.stdout, sys.stderr):
            file.flush()  # what could not be written is not the next one's
        _set_environ(self._environ)
        os.umask(_REST_MASK)
        os.chdir("/")


def let_go_of_streams() -> None:
    """They are nobody's from here on."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


def _set_environ(environ: dict[str, str]) -> None:
    """Only what differs is touched: threads of Ray's may be reading. What Ray has set for itself stays."""
    for name in os.environ.keys() - environ.keys():
        if not name.startswith("RAY_"):
            del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
