"""Notices that hosts are being drained, as Ray gives them. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raylaunch.cluster.ray_api import gcs_monitor
from raylaunch.cluster.ray_api.gcs_monitor import DrainNotices


@pytest.fixture(autouse=True)
def clocks(monkeypatch):
    monkeypatch.setattr(gcs_monitor, "time", SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 50.0))


def test_a_notice_is_reported_once():
    """And again if its deadline changed, or if it was withdrawn and given again."""
    notices = DrainNotices()

    def new(**found: int) -> list[tuple[str, float]]:
        return [(notice.host, notice.deadline) for notice in notices.new(found)]

    assert new(a=1030_000) == [("a", 80.0)]
    assert new(a=1030_000) == []
    assert new(a=1030_000, b=1010_000) == [("b", 60.0)]
    assert new(a=1020_000, b=1010_000) == [("a", 70.0)]
    assert new() == []
    assert new(b=1010_000) == [("b", 60.0)]


def test_a_notice_without_a_deadline():
    """Two minutes are assumed, and the reason says so."""
    (notice,) = DrainNotices().new({"a": 0})
    assert notice.deadline == 170.0
    assert "120 s are assumed" in notice.why


def test_a_notice_whose_deadline_is_past():
    """The notice is new, so the clocks of the two machines differ, and the host may be there for a while."""
    (notice,) = DrainNotices().new({"a": 990_000})
    assert notice.deadline == 60.0
    assert "10 s are assumed, since its deadline is past by our clock" in notice.why
