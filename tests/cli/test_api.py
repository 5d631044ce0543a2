"""The names that `import raylaunch` offers, and the exceptions of its functions."""

from __future__ import annotations

import pytest

import raylaunch
from raylaunch.cli import api
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.record.result import RunResult


@pytest.mark.parametrize("name", raylaunch.__all__)
def test_every_public_name_is_found(name):
    """The package finds each in a module that it names by a string, and imports only when it is used."""
    assert getattr(raylaunch, name).__name__ == name


def test_other_names_are_refused():
    """As by any module."""
    with pytest.raises(AttributeError, match="module 'raylaunch' has no attribute 'lunch'"):
        raylaunch.lunch  # noqa: B018


def test_ctrl_c_is_a_keyboard_interrupt():
    """A program's `except Exception` does not swallow it and go on with the next run."""
    cut = RunResult(exit_code=143, why="stopped by SIGTERM", seconds=1.0, restarts=0, attempts=(), cause=None)
    error = api.error_of(RunOutcome(result=cut))
    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, Exception)
    assert (str(error), error.exit_code) == ("stopped by SIGTERM", 143)
