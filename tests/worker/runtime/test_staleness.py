"""Whether the files of a script are those that a process has imported."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.worker.runtime import staleness
from raylaunch.worker.runtime.staleness import ImportedFiles


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files of a script, of a module beside it, and of an installed one."""
    found = {name: tmp_path / f"{name}.py" for name in ("script", "module", "installed")}
    found["installed"] = tmp_path / "site-packages" / "installed.py"
    found["installed"].parent.mkdir()
    for path in found.values():
        path.write_text("first = 1")
    modules = {name: SimpleNamespace(__file__=str(path)) for name, path in found.items()} | {"built_in": object()}
    facts = {"modules": modules, "path": [str(found["installed"].parent)], "prefix": "/usr", "base_prefix": "/usr"}
    monkeypatch.setattr(staleness, "sys", SimpleNamespace(**facts))
    return found


@pytest.mark.parametrize("name", ["script", "module"])
def test_another_version_of_an_own_file_is_noticed(files, name):
    """An editor writes it, or a file with an older time takes its place."""
    own = ImportedFiles()
    assert not own.have_changed()
    files[name].with_suffix(".new").write_text("second = 2")
    os.utime(files[name].with_suffix(".new"), (1.0, 1.0))
    files[name].with_suffix(".new").replace(files[name])
    assert own.have_changed()


def test_installed_files_and_those_that_are_gone_do_not_count(files):
    """What is gone cannot be imported again."""
    own = ImportedFiles()
    files["installed"].write_text("other = 10")
    files["module"].unlink()
    assert not own.have_changed()
