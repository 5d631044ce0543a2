"""The terminal that one worker has: which one, and what a person types there."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalGoal:
    """What was typed in this attempt, as far as it may be on its way: each with its number, the newest last."""

    inputs: tuple[tuple[int, TerminalInput], ...]


_GOALS = msgspec.msgpack.Decoder(TerminalGoal)


def dump(goal: TerminalGoal) -> bytes:
    """Return the section of a goal as bytes."""
    return msgspec.msgpack.encode(goal)


def load_goal(section: bytes) -> TerminalGoal:
    """Read the section of a goal."""
    return _GOALS.decode(section)
