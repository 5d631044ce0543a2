"""The names that `import raylaunch` offers."""

from __future__ import annotations

import pytest

import raylaunch


@pytest.mark.parametrize("name", raylaunch.__all__)
def test_every_public_name_is_found(name):
    """The package finds each in a module that it names by a string, and imports only when it is used."""
    assert getattr(raylaunch, name).__name__ == name


def test_other_names_are_refused():
    """As by any module."""
    with pytest.raises(AttributeError, match="module 'raylaunch' has no attribute 'lunch'"):
        raylaunch.lunch  # noqa: B018
