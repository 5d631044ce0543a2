"""Choosing where a run takes place, with a Ray that is not as it should be."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import raylaunch.cluster
from raylaunch.cluster import where
from raylaunch.core.job import RayOptions
from raylaunch.errors import ClusterError


def test_a_ray_that_lacks_what_is_used_of_it(monkeypatch):
    """Private parts may be elsewhere in another version: a person is told which one it takes, not of an import."""
    monkeypatch.delattr(raylaunch.cluster, "ray_session", raising=False)
    monkeypatch.setitem(sys.modules, "raylaunch.cluster.ray_session", None)
    with pytest.raises(ClusterError, match=r"Ray 2\.\d+.* which is installed here, cannot be used: ") as found:
        where.find(RayOptions(address="local"))
    assert f"install `{where.WANTED}` on all nodes" in found.value.hint


def test_the_versions_of_ray_are_those_of_the_metadata():
    """They are named twice."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert where.WANTED in project["dependencies"]
