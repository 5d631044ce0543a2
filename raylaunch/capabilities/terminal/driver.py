"""Passes on what a person types in the terminal of the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from msgspec import msgpack

from raylaunch.capabilities.terminal.agent import TerminalGoal, TerminalInput, TerminalSpec
from raylaunch.cluster.capability import DriverPart, DriverPort
from raylaunch.core.newtypes import RunTime

_MOST_INPUTS = 64
"""What a person types is a stream: the newest pieces are kept, more than can be on their way at one time."""


class Keyboard(Protocol):
    """The driver's terminal, as a run uses it."""

    @property
    def spec(self) -> TerminalSpec:
        """What the agents are told."""

    def connected(self, tell: Callable[[TerminalInput], None]) -> AbstractContextManager[None]:
        """Pass on what is typed, in a thread, for the time of a `with` block."""


class TerminalKeys(DriverPart):
    """Shows each node of the attempt what was typed. The node of the rank with the terminal uses it."""

    def __init__(self, keyboard: Keyboard, port: DriverPort) -> None:
        self._keyboard = keyboard
        self._port = port
        self._count = 0
        self._inputs: tuple[tuple[int, TerminalInput], ...] = ()

    def running(self) -> AbstractContextManager[None]:
        """Listen to the keyboard, in a thread."""
        return self._keyboard.connected(lambda keys: self._port.call(partial(self._typed, keys)))

    def launched(self, now: RunTime) -> None:
        """Forget what was typed for the workers of the last attempt."""
        del now
        self._inputs = ()

    def _typed(self, keys: TerminalInput) -> None:
        self._count += 1
        self._inputs = (*self._inputs, (self._count, keys))[-_MOST_INPUTS:]
        section = msgpack.encode(TerminalGoal(inputs=self._inputs))
        for node in self._port.machine.roster:
            self._port.show(node, section)
