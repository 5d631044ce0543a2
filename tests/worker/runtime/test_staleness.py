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


class Looked:
    """A module that notes when one looks at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times = 0

    @property
    def __file__(self) -> str:
        self.times += 1
        return str(self.path)


@pytest.fixture
def preloaded(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Looked:
    """A module of the script that was imported before the fork, as the only one but for `__main__`."""
    files["preloaded"] = files["script"].with_name("preloaded.py")
    files["preloaded"].write_text("first = 1")
    modules = staleness.sys.modules
    later = {name: modules.pop(name) for name in ("script", "module")}
    found = Looked(files["preloaded"])
    modules |= {"__main__": object(), "preloaded": found}
    monkeypatch.setattr(staleness, "preloaded", [])
    staleness.note_preloaded()
    modules |= {"__main__": later["script"], "module": later["module"]}
    return found


@pytest.mark.parametrize("name", ["script", "module", "preloaded"])
def test_what_was_imported_before_a_fork_counts_too(files, preloaded, name):
    """A forked process does not look at those modules again."""
    preloaded.times = 0
    own = ImportedFiles()
    assert not own.have_changed()
    assert preloaded.times == 0
    files[name].write_text("other = 10")
    assert own.have_changed()


@pytest.mark.parametrize("name", ["script", "module"])
def test_modules_are_looked_at_again_if_the_last_one_before_the_fork_is_not_where_it_was(files, preloaded, name):
    """A script may remove modules, and import them again."""
    del staleness.sys.modules["preloaded"]
    staleness.sys.modules["another"] = object()
    own = ImportedFiles()
    files[name].write_text("other = 10")
    assert own.have_changed()


def test_a_module_that_was_removed_before_hides_no_other(files, preloaded):
    del staleness.sys.modules["installed"]
    own = ImportedFiles()
    files["module"].write_text("other = 10")
    assert own.have_changed()
