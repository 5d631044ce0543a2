"""What the values of flags mean."""

from __future__ import annotations

from datetime import datetime

import pytest

from raylaunch.cli.args import flag_values
from raylaunch.errors import ConfigError

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90s", NOW - 90),
        ("10m", NOW - 600),
        ("1.5h", NOW - 5400),
        ("2d", NOW - 172_800),
        ("2026-01-31T09:00:00Z", 1_769_850_000.0),
        ("2026-01-31T10:00:00+01:00", 1_769_850_000.0),
        ("2026-01-31T09:00:00.5Z", 1_769_850_000.5),
        ("2026-01-31T09:00:00.123456789Z", 1_769_850_000.123456),
        ("2026-01-31", datetime(2026, 1, 31).timestamp()),  # noqa: DTZ001
    ],
)
def test_times(monkeypatch, text, meant):
    """So long ago, or a time of day."""
    monkeypatch.setattr("time.time", lambda: NOW)
    assert flag_values.time_since(text) == meant


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "10 m", "1e3s", "9" * 10 + "s", "yesterday", "\u0661m"])
def test_no_times(text):
    """The error names the flag."""
    with pytest.raises(ConfigError) as caught:
        flag_values.time_since(text)
    assert "--since 90s" in caught.value.hint


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "\u0661", "1" * 10])
def test_no_numbers(text):
    """Neither for Python's `int` of other scripts, nor very large ones."""
    assert not flag_values.is_whole(text)
    with pytest.raises(ConfigError, match="--last"):
        flag_values.number(text, "--last")
    with pytest.raises(ConfigError, match="--tail"):
        flag_values.number_or_all(text)
    assert (flag_values.number_or_all("all"), flag_values.number_or_all("7")) == (None, 7)
