"""The terminal of one of the agent's workers: a pty, of which the agent has the master end.

What the worker writes goes to its log file, as always, and at once to the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import termios
from dataclasses import dataclass, replace

from msgspec import msgpack

from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.decoding import prepare
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.logs.tail import LogOutput
from raylaunch.worker.runtime.spec import WorkerSpec

LONG_TIMEOUT = 7 * 86_400.0
"""Seconds that collectives wait, while a person debugs a rank."""
_CHUNK = 64 * 1024
_OUTPUT_FLAGS = 1
"""The index of the output flags in what `tcgetattr` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSpec:
    """Which rank has a terminal, and its size at the beginning."""

    rank: int
    columns: int
    lines: int
    is_debugged: bool
    """Whether a person types into it. If not, the rank's stdin is /dev/null as always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalInput:
    """What a person has typed, and the new size of the driver's terminal. It leads to nothing but output."""

    data: bytes = b""
    size: tuple[int, int] | None = None
    """Columns and lines; None: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalGoal:
    """What was typed in this attempt, as far as it may be on its way: each with its number, the newest last."""

    inputs: tuple[tuple[int, TerminalInput], ...]


prepare(TerminalGoal)


class WorkerTerminal(AgentPart):
    """One pty for all attempts. The slave end stays open here, so that the master end never reports a hang-up."""

    def __init__(self, spec: TerminalSpec, port: AgentPort) -> None:
        """Raises OSError if there is no pty."""
        self._spec = spec
        self._port = port
        #: The number of the newest input that was passed on.
        self._typed = 0
        self._master, self._slave = pty.openpty()
        os.set_blocking(self._master, False)
        #: The path by which the worker opens it.
        self._path = os.ttyname(self._slave)
        modes = termios.tcgetattr(self._slave)
        modes[_OUTPUT_FLAGS] &= ~termios.ONLCR  # the driver's terminal does that, and logs have plain newlines
        termios.tcsetattr(self._slave, termios.TCSANOW, modes)
        self._resize((spec.columns, spec.lines))
        #: The worker's log file, from its first output on.
        self._log = -1
        self._log_path = ""
        self._is_reading = False

    def workers(self, assignment: Assignment, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Give the rank the terminal, if it is among these."""
        del assignment
        self._close_log()
        self._log_path = next((spec.stdout for spec in specs if spec.rank == self._spec.rank), "")
        if self._log_path and not self._is_reading:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._master, self._readable)
        is_debugged = self._spec.is_debugged
        return tuple(
            replace(
                spec,
                terminal=self._path if spec.rank == self._spec.rank else "",
                takes_input=is_debugged,
                timeout=LONG_TIMEOUT if is_debugged else 0.0,
            )
            for spec in specs
        )

    def shown(self, section: bytes) -> None:
        """Pass on what was typed. What the worker does not read in time is lost, as with any terminal."""
        for number, keys in msgpack.decode(section, type=TerminalGoal).inputs:
            if number > self._typed:
                self._typed = number
                self._pass_on(keys)

    def _pass_on(self, keys: TerminalInput) -> None:
        if not self._log_path:
            return
        if keys.size is not None:
            self._resize(keys.size)
        with contextlib.suppress(BlockingIOError):
            os.write(self._master, keys.data)

    def _resize(self, size: tuple[int, int]) -> None:
        """Set the size; the kernel sends SIGWINCH to the worker."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def _readable(self) -> None:
        self.workers_changed()
        if self._port.is_full():  # the worker waits until the driver has caught up
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._master)
            loop.call_later(0.1, self._continue)

    def _continue(self) -> None:
        if self._is_reading:
            asyncio.get_running_loop().add_reader(self._master, self._readable)

    def workers_changed(self) -> None:
        """Send what the worker has written to the driver, and write it to the log file."""
        with contextlib.suppress(BlockingIOError):
            while not self._port.is_full() and (data := os.read(self._master, _CHUNK)):
                self._port.put_output(LogOutput(rank=self._spec.rank, stream="stdout", data=data))
                self._write_log(data)

    def _write_log(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the terminal shows it all the same
            if self._log < 0:
                self._log = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.write(self._log, data)

    def _close_log(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def close(self) -> None:
        """Close the terminal and the log file; a worker that still writes gets an error."""
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._master)
        self._close_log()
        os.close(self._master)
        os.close(self._slave)
