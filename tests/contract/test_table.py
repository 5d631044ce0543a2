"""The table in this package's `__init__.py` names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests import contract


def test_the_table_names_tests_that_there_are() -> None:
    assert contract.__doc__ is not None
    ours = " ".join(re.findall(r"(?:-> |^ {50,})(.*)$", contract.__doc__, re.MULTILINE))
    named = set(re.findall(r"\b[a-z0-9]+_[a-z0-9_]+\b(?!\.py)", re.sub(r"\[.*?\]", "", ours)))
    assert len(named) > 40
    there = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    }
    assert {name for name in named if not any(test.startswith(name) for test in there)} == set()
