"""Golden texts: what a person sees, kept in files; `--update-golden` rewrites them on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "cli" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("config/typo", text)` compares a text with tests/cli/golden/config/typo.txt."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        file = GOLDEN / f"{name}.txt"
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
        assert file.exists(), f"{file} is missing; run pytest --update-golden"
        assert text + "\n" == file.read_text(encoding="utf-8")

    return check
