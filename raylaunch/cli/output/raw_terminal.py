r"""The terminal of this process, given to one worker: what is typed goes to it as it is, and so does the window's size.

Only Ctrl-\ keeps its meaning, and stops the run. All else that a terminal does with keys, such as the signal that
Ctrl-C sends, the worker's own terminal does.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator

from raylaunch.capabilities.terminal.agent import TerminalInput, TerminalSpec
from raylaunch.errors import ConfigError

_CHUNK = 4096
_SIZE_SECONDS = 0.3
"""How often the size of the window is looked at. A handler of SIGWINCH would wait for the main thread."""
_INPUT_FLAGS, _LOCAL_FLAGS, _CONTROL_CHARACTERS = 0, 3, 6
"""Indices of what `tcgetattr` returns."""


class RawTerminal:
    """The terminal for a rank. `is_debugged`: what is typed goes there too."""

    def __init__(self, rank: int, *, is_debugged: bool) -> None:
        """Raises ConfigError if there is no terminal."""
        flag = f"`--debug {rank}`" if is_debugged else "`--pty`"
        streams = (sys.stdin, sys.stdout) if is_debugged else (sys.stdout,)
        if not all(stream is not None and stream.isatty() for stream in streams):
            msg = f"{flag} needs a terminal, and {'stdin or stdout' if is_debugged else 'stdout'} is none"
            raise ConfigError(msg, hint="`ray job submit` gives a job no terminal; run the command in a shell")
        self._out = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        self._in = 0
        columns, lines = os.get_terminal_size(self._out)
        self.spec = TerminalSpec(rank=rank, columns=columns or 80, lines=lines or 24, is_debugged=is_debugged)

    @contextlib.contextmanager
    def connected(self, tell: Callable[[TerminalInput], None]) -> Iterator[None]:
        """Pass on what is typed, in a thread, for the time of a `with` block."""
        readable, writable = os.pipe()
        thread = threading.Thread(target=self._follow, args=(tell, readable), daemon=True, name="raylaunch-terminal")
        with _raw(self._in) if self.spec.is_debugged else contextlib.nullcontext():
            thread.start()
            try:
                yield
            finally:
                os.close(writable)
                thread.join()
                os.close(readable)

    def _follow(self, tell: Callable[[TerminalInput], None], end: int) -> None:
        """Read until the other end of the pipe `end` is closed."""
        size = (self.spec.columns, self.spec.lines)
        inputs = [self._in, end] if self.spec.is_debugged else [end]
        while True:
            ready, _, _ = select.select(inputs, [], [], _SIZE_SECONDS)
            if end in ready:
                return
            if ready:
                data = b""
                with contextlib.suppress(OSError):  # the terminal is gone
                    data = os.read(self._in, _CHUNK)
                if not data:
                    inputs = [end]
                    continue
                tell(TerminalInput(data=data))
            with contextlib.suppress(OSError):
                now = os.get_terminal_size(self._out)
                if tuple(now) != size:
                    size = (now.columns, now.lines)
                    tell(TerminalInput(size=size))


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    r"""Give every key to whoever reads, but for Ctrl-\. Output is still processed: a newline also returns.

    If this process is killed, bash restores the terminal; in a shell that does not, `stty sane` does.
    """
    before = termios.tcgetattr(fd)
    modes = termios.tcgetattr(fd)
    modes[_INPUT_FLAGS] &= ~(termios.ICRNL | termios.IXON)
    modes[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    for name in (termios.VINTR, termios.VSUSP):
        modes[_CONTROL_CHARACTERS][name] = os.fpathconf(fd, "PC_VDISABLE").to_bytes(1, "little")
    modes[_CONTROL_CHARACTERS][termios.VMIN], modes[_CONTROL_CHARACTERS][termios.VTIME] = b"\x01", b"\x00"
    try:
        termios.tcsetattr(fd, termios.TCSADRAIN, modes)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
