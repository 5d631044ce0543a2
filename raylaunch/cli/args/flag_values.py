"""What the values of the subcommands' flags mean. Each function raises ConfigError, which names the flag."""

from __future__ import annotations

import contextlib
import math
import re
import time

from raylaunch.cluster.local.scheduler import moment_of
from raylaunch.errors import ConfigError

_MOST_DIGITS = 9
_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, 0 or more, in ASCII digits, of which there are not too many."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def number(text: str, option: str) -> int:
    """Return the number that a flag such as `-n 10` has: a whole one, 0 or more."""
    if not is_whole(text):
        raise ConfigError(f"`{option}` must be a number, but is `{text}`", hint=f"write `{option} 10`")
    return int(text)


def number_or_all(text: str) -> int | None:
    """Return the whole number that `--tail` has; None for `all`."""
    if text != "all" and not is_whole(text):
        raise ConfigError(f"`--tail` must be a number or `all`, but is `{text}`", hint="write `--tail 100`")
    return None if text == "all" else int(text)


def seconds(text: str) -> float:
    """Return the seconds that `--grace` has, 0 or more."""
    with contextlib.suppress(ValueError):
        if math.isfinite(found := float(text)) and found >= 0 and text.isascii():
            return found
    raise ConfigError(f"`--grace` must be a number of seconds, but is `{text}`", hint="write `--grace 600`")


def ranks(text: str) -> tuple[range, ...]:
    """Return the ranks that `--rank` has, such as `0,3-5`."""
    found = [_RANKS.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"`{text}` is not a list of ranks", hint="write `--rank 0,3-5`")
    return tuple(range(int(part[1]), int(part[2] or part[1]) + 1) for part in found if part)


def time_since(text: str) -> float:
    """Return the time that `--since` has, in seconds since 1970: so long ago (`10m`), or ISO 8601, in local time."""
    if found := _AGE.fullmatch(text):
        return time.time() - float(found[1]) * _UNITS[found[2]]
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return moment_of(text).timestamp()
    hint = "write `--since 90s`, `10m`, `2h`, `1d`, or a time such as `2026-01-31T09:00:00Z`"
    raise ConfigError(f"`{text}` is no time", hint=hint)
