"""Finding the cluster with a Ray that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import raylaunch.cluster.session
from raylaunch.cluster import run
from raylaunch.core.job.job import RayOptions
from raylaunch.errors import ClusterError


def test_a_ray_without_the_private_api_that_is_used(monkeypatch):
    """Another version may lack it. The error names the versions that have it, not an import."""
    monkeypatch.delattr(raylaunch.cluster.session, "ray_session", raising=False)
    monkeypatch.setitem(sys.modules, "raylaunch.cluster.session.ray_session", None)
    with pytest.raises(ClusterError, match=r"Ray 2\.\d+.* which is installed here, cannot be used: ") as found:
        run.find_cluster(RayOptions(address="local"))
    assert f"install `{run.WANTED}` on all nodes" in found.value.hint


def test_the_versions_of_ray_are_those_of_the_metadata():
    """The range is written in two places."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert run.WANTED in project["dependencies"]


def test_without_ray(monkeypatch):
    """The error names the interpreter, since several may be on a node and one of them runs Ray."""
    monkeypatch.delattr(raylaunch.cluster.session, "ray_session", raising=False)
    monkeypatch.setitem(sys.modules, "raylaunch.cluster.session.ray_session", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ClusterError, match="Ray is not installed") as found:
        run.find_cluster(RayOptions(address="local"))
    assert found.value.message == f"Ray is not installed for {sys.executable}"
