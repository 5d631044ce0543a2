"""A terminal that programs run in: a pty, and pyte, which shows what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

pyte = pytest.importorskip("pyte", reason="pyte, of the extra `dev`, shows what a terminal would")


class Terminal:
    """A program in a terminal of its own, of which it is the session leader. Call `close` at the end."""

    def __init__(self, argv: Sequence[str], columns: int, lines: int, env: Mapping[str, str] | None = None) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=100_000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                environ = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
                while os.get_terminal_size(0) != (columns, lines):
                    time.sleep(0.01)
                os.execvpe(argv[0], [*argv], environ | {"TERM": "xterm"} | (env or {}))
            finally:
                os._exit(127)
        self._set_size(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        self._set_size(columns, lines)
        self.screen.resize(lines, columns)
        self.screen.set_margins()  # as xterm and tmux do

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read(self, seconds: float) -> bool:
        """Show what the program writes within this time. Return False if it has ended."""
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # EIO: nobody has the terminal open any more
                return False
            self.raw += data
            self._stream.feed(data)
            return bool(data)
        return True

    def until(self, condition: Callable[[], object], seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "\n".join(self.rows)
            if not self.read(0.1) and not condition():
                raise AssertionError("\n".join(self.rows))

    def end(self, seconds: float = 200.0) -> int:
        """Show everything until the program has ended, and return its exit code, or the negative number of a signal."""
        deadline = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < deadline, "\n".join(self.rows)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]

    @property
    def text(self) -> str:
        """All that was ever shown, one row after the other, rows that are full being continued by the next."""
        width = self.screen.columns
        past = ["".join(row[column].data for column in range(width)) for row in self.screen.history.top]
        return "".join(row if not row[-1:].isspace() else row.rstrip() + "\n" for row in [*past, *self.screen.display])

    @property
    def modes(self) -> list[Any]:
        """The settings of the terminal, as `termios.tcgetattr` returns them."""
        return termios.tcgetattr(self._fd)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)
