"""Puts a terminal in order when this process is stopped (Ctrl-Z), or was killed, while it has a row at the bottom."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TextIO

from raylaunch.cli.output.async_writer import AsyncWriter
from raylaunch.cli.output.bottom_row import END, BottomRow

_SCRIPT = """trap '' HUP INT QUIT TERM TSTP TTIN TTOU
read -r _ && exit
printf '%s' "$0"
[ -z "$1" ] || stty "$1" <&1
"""
_WAIT_SECONDS = 1.0


def fit_terminal(stderr: TextIO | None, environ: Mapping[str, str]) -> TextIO | None:
    """Return stderr if a row can be kept at its bottom: the process's own terminal, neither dumb nor in CI.

    None also in a thread, beside which the program may ask for input.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or stderr is None
        or not stderr.isatty()
        or stderr is not sys.__stderr__
    ):
        return None
    is_capable = environ.get("TERM", "") not in ("", "dumb")
    in_ci = environ.get("CI", "false").lower() not in ("", "0", "false")
    return stderr if is_capable and not in_ci else None


def size_of(terminal: int) -> tuple[int, int] | None:
    """Return its columns and lines; None if this process is in the background of its session, or it is gone."""
    try:
        with contextlib.suppress(OSError):  # it is the terminal of another session, whose daemon this is
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return None
        return os.get_terminal_size(terminal)
    except OSError:
        return None


class TerminalGuard:
    """A shell that waits for the end of a pipe, which the kernel closes when this process dies.

    The shell ignores the signals that a terminal sends to all processes of a group.
    """

    def __init__(self, terminal: TextIO | int, *, data: str = "", settings: str = "") -> None:
        """If this process dies before `close`, `data` is written to the terminal.

        `settings`: as `stty -g` prints them; the terminal gets them then.
        """
        self._shell: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # there is no shell, or no more processes: only a guard is missing
            self._shell = subprocess.Popen(  # noqa: S603
                ["/bin/sh", "-c", _SCRIPT, data, settings],
                stdin=subprocess.PIPE,
                stdout=terminal,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )

    def close(self) -> None:
        """End the shell without changing the terminal, which this process has restored itself."""
        if self._shell is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._shell.communicate(b"\n", timeout=_WAIT_SECONDS)


Guards = tuple["TerminalGuard | SuspendHandler", ...]
"""What is closed when the bottom row is not shown any more."""


def show_row(writer: AsyncWriter, text: Callable[[int], str]) -> Guards:
    """Show a row below all output if stderr is a terminal that is fit for it, and return what guards the terminal.

    `text` returns the row for so many columns. The writer's stdout is kept above the row if it is a terminal, too.
    """
    terminal = fit_terminal(sys.stderr, os.environ)
    if terminal is None:
        return ()
    fd = terminal.fileno()
    row = BottomRow(text, lambda: size_of(fd))
    guards = TerminalGuard(terminal, data=END), SuspendHandler(pause=writer.hide_row, resume=writer.unhide_row)
    is_shared = sys.stdout is not None and sys.stdout.isatty()
    writer.show_row(row, ("stdout", "stderr") if is_shared else ("stderr",))
    return guards


def settings_of(terminal: int) -> str:
    """Return the settings of a terminal as `stty -g` prints them; `""` if there is no such program."""
    try:
        found = subprocess.run(["stty", "-g"], stdin=terminal, capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return found.stdout.strip()


class SuspendHandler:
    """A handler of SIGTSTP, which Ctrl-Z sends: something is done before this process is stopped, and when it goes on.

    `pause` and `resume` are called in the main thread, which must also call all methods.
    """

    def __init__(self, *, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause, self._resume = pause, resume
        #: Another handler is that of the program that this is in, or of its caller, who wants something else.
        self._is_ours = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTSTP, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._pause()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._resume()

    def close(self) -> None:
        """Give SIGTSTP its default action again, if this handler has replaced it."""
        if self._is_ours:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
