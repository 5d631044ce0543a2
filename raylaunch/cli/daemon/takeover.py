"""Take over a command's folder, environment, streams, umask and signals for a run, and give them up after it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

from raylaunch.cli.daemon.daemon_messages import RunRequest

_IDLE_UMASK = 0o077


class Takeover:
    """What this process takes over from a command for the duration of its run."""

    def __init__(self, run: RunRequest, streams: dict[int, int]) -> None:
        """`streams`: open files by the descriptor (0, 1, 2) that they become; `enter` or `leave` closes them."""
        self._run = run
        self._streams = streams
        self._environ = dict(os.environ)
        names = {*run.job.signals_to_handle, *run.job.signals_to_forward} & signal.Signals.__members__.keys()
        self._signals = {name: signal.Signals[name] for name in names}

    def enter(self) -> None:
        """Take over. Raises OSError if the folder cannot be entered."""
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
        """Return the handler until the run sets its own: Python's default, but a forwarded signal must not kill."""
        if name in self._run.ignored:
            return signal.SIG_IGN
        if name in self._run.job.signals_to_forward:
            return lambda *_: None
        return signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL

    def leave(self) -> None:
        """Flush the output and restore what was there before `enter`."""
        for number in self._signals.values():
            signal.signal(number, signal.SIG_DFL)
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader is gone
                file.flush()
        for fd in self._streams.values():
            os.close(fd)
        close_streams()
        for file in (sys.stdout, sys.stderr):
            file.flush()  # discards what could not be written, or the next run would print it
        _set_environ(self._environ)
        os.umask(_IDLE_UMASK)
        os.chdir("/")


def close_streams() -> None:
    """Replace stdin, stdout and stderr by /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def _set_environ(environ: dict[str, str]) -> None:
    """Set only the variables that differ, since threads of Ray may read the others; keep those that Ray has set."""
    for name in os.environ.keys() - environ.keys():
        if not name.startswith("RAY_"):
            del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
