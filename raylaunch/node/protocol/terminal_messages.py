"""The terminal that one worker has: which one, and what the driver sends to it. `--debug` and `--pty` ask for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

LONG_TIMEOUT = 7 * 86_400.0
"""Seconds that collectives wait, while a person debugs a rank."""


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


class Keyboard(Protocol):
    """The driver's terminal, as a run uses it."""

    @property
    def spec(self) -> TerminalSpec:
        """What the agents are told."""

    def connected(self, tell: Callable[[TerminalInput], None]) -> AbstractContextManager[None]:
        """Pass on what is typed, in a thread, for the time of a `with` block."""
