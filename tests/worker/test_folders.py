"""Folders of a run are the user's alone on every node, also where no driver has made them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.worker import folders


@pytest.fixture(autouse=True)
def everybody_may() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_who_may_look(tmp_path):
    """From the run's folder down, its user; above it, whoever the umask lets."""
    rank = tmp_path / "runs" / "name" / "run" / "attempt-1" / "rank-0"
    folders.make(str(rank), above=2)
    folders.make(str(rank.with_name("rank-1")), above=2)
    assert [mode(path) for path in (rank, *rank.parents[:4])] == [0o700, 0o700, 0o700, 0o777, 0o777]
    assert mode(rank.with_name("rank-1")) == 0o700


def test_what_is_there_stays_as_it_is(tmp_path):
    """Somebody else may have made it a moment ago; what is in the way is an error as ever."""
    (tmp_path / "file").touch()
    folders.make(str(tmp_path), above=2)
    with pytest.raises(NotADirectoryError):
        folders.make(str(tmp_path / "file" / "rank-0"), above=2)
