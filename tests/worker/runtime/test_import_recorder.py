"""The imports of a worker are recorded, and the worker does not notice."""

import importlib
import importlib.util
import os
import sys

import pytest

from raylaunch.node.protocol.wire import memory_file
from raylaunch.worker.runtime.import_recorder import ImportRecord, ImportRecorder, read_records
from raylaunch.worker.runtime.server_file import ServerFile


@pytest.fixture
def start_recorder(tmp_path, monkeypatch):
    """Starts a recorder; returns a function that returns all records."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    file = memory_file("raylaunch-imports")

    def start(local_rank=0):
        ImportRecorder(ServerFile.inherited(file, os.getpid()), local_rank).install()
        return lambda: list(read_records(os.pread(file, 1 << 20, 0)))

    before = set(sys.modules)
    yield start
    for name in set(sys.modules) - before:
        del sys.modules[name]
    os.close(file)


def test_each_imported_module_is_recorded_once_with_its_location(start_recorder, tmp_path):
    """Records are in the order in which imports begin. `find_spec` alone is no import."""
    (tmp_path / "first_one").mkdir()
    (tmp_path / "first_one" / "__init__.py").write_text("import second_one\nfrom . import inner\nimport no_such_one")
    (tmp_path / "first_one" / "inner.py").write_text("")
    (tmp_path / "second_one.py").write_text("")
    (tmp_path / "only_looked_for.py").write_text("")
    records = start_recorder()
    assert importlib.util.find_spec("only_looked_for") is not None
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_one"):
            importlib.import_module("first_one")
    assert [(record.name, record.locations) for record in records()] == [
        ("first_one", (str(tmp_path / "first_one" / "__init__.py"),)),
        ("second_one", (str(tmp_path / "second_one.py"),)),
        ("first_one.inner", (str(tmp_path / "first_one"),)),
        ("no_such_one", ()),
    ]


def test_changes_of_the_environment_are_recorded_with_the_import(start_recorder, tmp_path, monkeypatch):
    """Workers with another local rank than 0 record nothing else."""
    for name in "abcd":
        (tmp_path / f"is_{name}.py").write_text("")
    monkeypatch.setenv("GOES", "1")
    first, other = start_recorder(), start_recorder(1)
    importlib.import_module("is_a")
    monkeypatch.setenv("COMES", "1")
    monkeypatch.delenv("GOES")
    importlib.import_module("is_b")
    importlib.import_module("is_c")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"MINE": "1"})
        importlib.import_module("is_d")  # nothing is recorded any more, and the import works
    assert first() == other()
    assert [(record.local_rank, record.name, record.env) for record in first()] == [
        (0, "is_a", {}),
        (1, "", {"COMES": "1", "GOES": None}),
        (0, "is_b", {"COMES": "1", "GOES": None}),
        (0, "is_c", {"COMES": "1", "GOES": None}),
    ]


def test_another_file_under_the_same_descriptor_is_not_written(tmp_path, monkeypatch):
    """A script may close all files and open its own. A child process of the worker writes nothing at all."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "any_one.py").write_text("")
    (tmp_path / "another_one.py").write_text("")
    file = memory_file("raylaunch-imports")
    ImportRecorder(ServerFile.inherited(file, os.getpid()), 0).install()
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


WHOLE = b'[0, "a", ["b"], {"X": null}]\n'


A = ImportRecord(local_rank=0, name="a", locations=("b",), env={"X": None})


def test_a_record_that_is_cut_off_is_left_out() -> None:
    """The records before it are read."""
    assert list(read_records(WHOLE * 2 + WHOLE[:-3])) == [A] * 2


@pytest.mark.parametrize(
    "line",
    [
        b"\x80\x04garbage \xff",
        b"",
        b"null",
        b"[" * 100_000,
        b'[0, "a", ["b"]]',
        b'["0", "a", ["b"], {}]',
        b'[0, 1, ["b"], {}]',
        b'[0, "a", "b", {}]',
        b'[0, "a", [1], {}]',
        b'[0, "a", ["b"], {"X": 1}]',
        b"1" * 5000,
    ],
)
def test_a_line_that_is_no_record_is_left_out(line: bytes) -> None:
    """A script may write to any descriptor; the records around the line are read."""
    assert list(read_records(WHOLE + line + b"\n" + WHOLE)) == [A] * 2
