"""How hypothesis draws the cases of the properties: always the same ones in `make test`, new ones in `make fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FIXED = "fixed"
FUZZ = "fuzz"
_BASE = settings(
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no error
)
_MORE = 5
"""How many times as many cases `fuzz` draws."""


def register() -> None:
    """Register both profiles and load `fixed`; pytest's `--hypothesis-profile=fuzz` loads the other one."""
    settings.register_profile(FIXED, _BASE, derandomize=True)
    settings.register_profile(FUZZ, _BASE, derandomize=False, print_blob=True)
    settings.load_profile(FIXED)


def is_fuzzing() -> bool:
    """Return whether this is `make fuzz`."""
    return settings.get_current_profile_name() == FUZZ


def examples(count: int) -> settings:
    """Return a decorator that gives a property so many cases, or five times as many under `fuzz`."""
    return settings(max_examples=count * _MORE if is_fuzzing() else count)
