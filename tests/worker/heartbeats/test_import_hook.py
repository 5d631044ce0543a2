"""A callback is called right after a module is loaded, and then the import hook is removed."""

import importlib
import importlib.util
import sys

import pytest

from raylaunch.worker.heartbeats.import_hook import ImportHook


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Returns a function that writes a module which can be imported during the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text="DONE = []\n"):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def when_imported():
    return ImportHook().when_imported


def finders():
    return [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]


def done(module):
    module.DONE.append(module.__name__)


def test_a_module_that_is_imported_already(modules, when_imported):
    modules("early")
    module = importlib.import_module("early")
    when_imported("early", done)
    assert module.DONE == ["early"]
    assert not finders()


def test_a_module_that_is_imported_later(modules, when_imported):
    modules("comes_later")
    modules("uses_it", "import comes_later\nSEEN = list(comes_later.DONE)")
    when_imported("comes_later", done)
    when_imported("comes_later", done)
    assert len(finders()) == 1
    assert importlib.import_module("uses_it").SEEN == ["comes_later"] * 2
    assert not finders()
    assert "exec_module" not in vars(sys.modules["comes_later"].__loader__)


def test_several_modules_in_any_order(modules, when_imported):
    for name in ("one", "other"):
        modules(name)
        when_imported(name, done)
    assert importlib.import_module("other").DONE == ["other"]
    assert len(finders()) == 1
    assert importlib.import_module("one").DONE == ["one"]
    assert not finders()


def test_find_spec_is_no_import(modules, when_imported):
    modules("looked_for")
    when_imported("looked_for", done)
    assert importlib.util.find_spec("looked_for") is not None
    assert importlib.import_module("looked_for").DONE == ["looked_for"]


def test_a_module_whose_first_import_fails(modules, when_imported):
    modules("fails", "import sys\nDONE = []\nif not hasattr(sys, 'mended'): raise ValueError('yet')")
    when_imported("fails", done)
    with pytest.raises(ValueError, match="yet"):
        importlib.import_module("fails")
    sys.mended = True
    try:
        assert importlib.import_module("fails").DONE == ["fails"]
    finally:
        del sys.mended


def test_a_module_that_does_not_exist(modules, when_imported):
    when_imported("no_such_module_at_all", done)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module("no_such_module_at_all")
