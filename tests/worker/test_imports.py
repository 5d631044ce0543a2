"""What a worker imports is written down, and the worker does not notice."""

import importlib
import importlib.util
import os
import pickle
import sys

import pytest

from raylaunch.node.wire import memory_file
from raylaunch.worker.imports import Note, Notes, read


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Begins to take notes; gives all that were taken."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    file = memory_file("raylaunch-imports")

    def begin(local_rank=0):
        Notes(file, local_rank).begin()
        return lambda: list(read(os.pread(file, 1 << 20, 0)))

    before = set(sys.modules)
    yield begin
    for name in set(sys.modules) - before:
        del sys.modules[name]
    os.close(file)


def test_each_module_that_is_imported_is_noted_once_with_its_place(notes, tmp_path):
    """In the order in which imports begin; looking for a module is no import."""
    (tmp_path / "first_one").mkdir()
    (tmp_path / "first_one" / "__init__.py").write_text("import second_one\nfrom . import inner\nimport no_such_one")
    (tmp_path / "first_one" / "inner.py").write_text("")
    (tmp_path / "second_one.py").write_text("")
    (tmp_path / "only_looked_for.py").write_text("")
    taken = notes()
    assert importlib.util.find_spec("only_looked_for") is not None
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_one"):
            importlib.import_module("first_one")
    assert [(note.name, note.where) for note in taken()] == [
        ("first_one", (str(tmp_path / "first_one" / "__init__.py"),)),
        ("second_one", (str(tmp_path / "second_one.py"),)),
        ("first_one.inner", (str(tmp_path / "first_one"),)),
        ("no_such_one", ()),
    ]


def test_what_the_script_has_changed_in_the_environment_is_noted_with_the_import(notes, tmp_path, monkeypatch):
    """Of workers that are not the first of their node, that alone."""
    for name in "abcd":
        (tmp_path / f"is_{name}.py").write_text("")
    monkeypatch.setenv("GOES", "1")
    first, other = notes(), notes(1)
    importlib.import_module("is_a")
    monkeypatch.setenv("COMES", "1")
    monkeypatch.delenv("GOES")
    importlib.import_module("is_b")
    importlib.import_module("is_c")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"MINE": "1"})
        importlib.import_module("is_d")  # no more is noted, and nothing fails
    assert first() == other()
    assert [(note.local_rank, note.name, note.env) for note in first()] == [
        (0, "is_a", {}),
        (1, "", {"COMES": "1", "GOES": None}),
        (0, "is_b", {"COMES": "1", "GOES": None}),
        (0, "is_c", {"COMES": "1", "GOES": None}),
    ]


def test_a_file_that_took_the_place_of_the_notes_is_left_alone(tmp_path, monkeypatch):
    """A script may close all files and open its own; and what is forked from a worker writes nothing."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "any_one.py").write_text("")
    (tmp_path / "another_one.py").write_text("")
    file = memory_file("raylaunch-imports")
    Notes(file, 0).begin()
    pid = os.fork()
    if pid == 0:
        importlib.import_module("any_one")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.fstat(file).st_size == 0
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    os.dup2(mine, file)
    importlib.import_module("another_one")
    assert (tmp_path / "mine").read_bytes() == b""
    os.close(mine)
    os.close(file)


def test_notes_that_were_cut_off():
    """Those before are whole."""
    note = pickle.dumps((0, "a", ("b",), {}))
    assert list(read(note * 2 + note[:-3])) == [Note(local_rank=0, name="a", where=("b",), env={})] * 2
