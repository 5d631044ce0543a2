"""The facts of this machine, also where something is missing."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading

import pytest

from raylaunch.cli.doctor import node_report
from raylaunch.cli.doctor.node_report import NodeReport, Questions


def test_this_machine(tmp_path):
    """Nothing is wrong with it, and the report can be sent."""
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as door:
        asked = Questions(
            script=str(tmp_path / "train.py"),
            cwd=str(tmp_path),
            marker=str(tmp_path / "train.py"),
            log_dir=str(tmp_path / "runs"),
            door=door.getsockname(),
        )
        found = node_report.report(asked)
    assert isinstance(pickle.loads(pickle.dumps(found)), NodeReport)
    assert (found.has_folder, found.sees_marker) == (True, True)
    assert (found.log_dir_problem, found.door_problem) == ("", "")
    assert len(found.program) == 64
    assert found.temporary is not None
    assert found.versions["torch"]


def test_what_is_not_there(tmp_path):
    """Neither folder nor file nor driver; a folder of runs below a file cannot be made."""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as door:
        closed = door.getsockname()
    gone = str(tmp_path / "gone")
    asked = Questions(script=gone, cwd=gone, marker=gone, log_dir=str(tmp_path / "file" / "runs"), door=closed)
    found = node_report.report(asked)
    assert (found.program, found.has_folder, found.sees_marker) == ("", False, False)
    assert found.log_dir_problem == f"{tmp_path / 'file'} is a file"
    assert found.door_problem == "Connection refused"


@pytest.mark.parametrize(
    ("limit", "pattern", "expected"),
    [(-1, "core.%p", True), (-1, "|/usr/lib/systemd/systemd-coredump", False), (0, "core.%p", False)],
)
def test_core_files(monkeypatch, limit, pattern, expected):
    """A program that the kernel gives them to limits them."""
    monkeypatch.setattr(node_report.resource, "getrlimit", lambda _: (limit, -1))
    monkeypatch.setattr(node_report.Path, "read_text", lambda *_, **__: pattern)
    assert node_report.report(Questions()).has_core_files == expected


@pytest.mark.parametrize(
    ("asked", "is_there"),
    [
        ({"module": "json.tool"}, True),
        ({"module": "own.train"}, True),
        ({"module": "no_such_module"}, False),
        ({"command": os.path.basename(sys.executable)}, True),
        ({"command": "./run"}, True),
        ({"command": "no-such-command"}, False),
        ({"script": "package"}, True),
        ({}, False),
    ],
)
def test_programs(tmp_path, monkeypatch, asked, is_there):
    """Modules are found in the folder too, without being imported; commands on the PATH or in the folder."""
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    (tmp_path / "run").touch(mode=0o755)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    if "script" in asked:
        asked = {"script": str(tmp_path / asked["script"])}
    path = [*sys.path]
    assert bool(node_report.report(Questions(cwd=str(tmp_path), **asked)).program) == is_there
    assert sys.path == path


@pytest.mark.parametrize(("script", "expected"), [("echo 12; echo 13", 2), ("echo [N/A]", 0), ("exit 9", 0)])
def test_programs_on_gpus(tmp_path, monkeypatch, script, expected):
    """As `nvidia-smi` counts them; it may fail."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_report.report(Questions()).gpu_processes == expected


def test_a_file_system_that_does_not_answer(monkeypatch):
    """The report comes without it."""
    monkeypatch.setattr(node_report, "_MOST_SECONDS", 0.05)
    answers = threading.Event()
    monkeypatch.setattr(node_report, "log_dir_problem", lambda _: answers.wait(200))
    assert node_report.report(Questions(log_dir="/gone")).log_dir_problem == "its file system does not answer"
    answers.set()
