"""The ranges of the numbers in a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

_DAY = 86_400
_YEAR = 365 * _DAY
_MAX_NODES = 100_000
_MAX_WORKERS = 1_000_000
_MAX_COUNT = 1_000_000_000
_MAX_GIB = 1_000_000


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers that a setting takes."""

    least: float
    most: float
    is_time: bool = False
    """Whether the number is in seconds."""
    above: bool = False
    """Whether it must be greater than the least one."""
    endless: bool = False
    """Whether infinity is also allowed."""
    hint: str = ""
    """What to do if the number is not in the range."""


WORKERS = NumberRange(1, _MAX_WORKERS, hint="at least one worker is needed")
_WAIT = NumberRange(0, _YEAR, is_time=True, above=True, endless=True)
_TIME = NumberRange(0, _YEAR, is_time=True)

# Timers of Linux and Python refuse times that are much longer than a year.
RANGES = {
    "nprocs": WORKERS,
    "placement_timeout": _WAIT,
    "join_timeout": _WAIT,
    "start_timeout": NumberRange(0, _YEAR, is_time=True, above=True),
    "hang_timeout": NumberRange(0, _YEAR, is_time=True, above=True, hint="`off` stands for never"),
    "last_call": _TIME,
    "shutdown_timeout": _TIME,
    "state_memory": NumberRange(0, _MAX_GIB, above=True),
    "durable_every": _TIME,
    "durable_keep": NumberRange(1, _MAX_COUNT),
    "keep_warm": _TIME,
    "driver_timeout": _TIME,
    # A busy host may be silent for almost a second.
    "node_timeout": NumberRange(1, _DAY, is_time=True),
    "max_restarts": NumberRange(0, _MAX_COUNT),
    "debug": NumberRange(0, _MAX_COUNT),
    "exclude_after": NumberRange(0, _MAX_COUNT),
    "spares": NumberRange(0, _MAX_NODES),
    "cpus_per_worker": NumberRange(0, _MAX_WORKERS),
    "multiple_of": NumberRange(1, _MAX_WORKERS, hint="1 allows every world size"),
}
"""By the key of a job. Some of these settings may also be text, which is not looked at here."""

NODES = NumberRange(1, _MAX_NODES)
"""The range of each number in `nnodes`."""
RULE_WORKERS = NumberRange(0, _MAX_WORKERS, hint="0 excludes such nodes")
"""The range of `nproc_per_node` in a rule of `nodes`."""


def problem(value: float, allowed: NumberRange) -> tuple[str, str] | None:
    """Return what is wrong with a number, and a hint or ""; None if it is in the range."""
    text = written(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number", allowed.hint
    if allowed.above and value <= allowed.least:
        return f"{text} seconds is no time: more than {allowed.least:g} is expected", allowed.hint
    if value < allowed.least:
        unit = " seconds" if allowed.is_time and allowed.least else ""
        return f"{text}{unit} is less than {allowed.least:g}", allowed.hint or f"{allowed.least:g} or more is expected"
    if value <= allowed.most or (allowed.endless and math.isinf(value)):
        return None
    if allowed.is_time:
        named = "a year" if allowed.most == _YEAR else "a day"
        return f"{text} seconds is more than {named}", allowed.hint or f"a day is {_DAY}, a year is {_YEAR}"
    return f"{text} is too large: the limit is {allowed.most:,}", ""


def written(value: float | str) -> str:
    """Return a number as text. Python cannot make text of an integer that is too long."""
    try:
        return value if isinstance(value, str) else f"{value:.12g}"
    except OverflowError:
        return "this number"
