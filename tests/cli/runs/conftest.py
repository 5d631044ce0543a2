"""A registry for the tests of this package; the machine is called `vm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs.made_runs import Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """An empty registry, which the commands of this process use too. The working folder is a new one."""
    found = Registry(tmp_path / "state")
    (tmp_path / "state").mkdir()
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    for name in ("XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, found.environ[name])
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("raylaunch.cluster.control.cluster_registry.runs", lambda _: [])
    monkeypatch.chdir(tmp_path)
    return found
