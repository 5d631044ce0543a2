"""Variables that keep Ray from exporting metrics of this process."""

from __future__ import annotations

import os

import pytest

from raylaunch.cluster.session import ray_session
from raylaunch.cluster.session.ray_session import METRICS_VARIABLES


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in METRICS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def variables() -> list[str | None]:
    return [os.environ.get(name) for name in METRICS_VARIABLES]


def test_the_variables_are_there_only_while_ray_may_read_them():
    """Also after an error. What inherits the environment later does not have them."""
    seen = []

    @ray_session.without_metrics_exporter()
    def connect() -> None:
        seen.append(variables())
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        connect()
    assert seen == [["0", "0"]]
    assert variables() == [None, None]


@pytest.mark.parametrize("name", METRICS_VARIABLES)
def test_what_the_person_has_set_is_kept(monkeypatch, name):
    """Either of the variables is enough to export as Ray does."""
    monkeypatch.setenv(name, "1")
    expected = ["1" if each == name else None for each in METRICS_VARIABLES]
    with ray_session.without_metrics_exporter():
        assert variables() == expected
    assert variables() == expected
