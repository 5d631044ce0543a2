"""TORCHELASTIC_ERROR_FILE of the command itself: the root cause's error, as torchrun leaves it there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raylaunch.cli.error_file import VARIABLE, leave_copy
from raylaunch.core import error_file
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.result import RunResult

NAN = WorkerError(type="ValueError", message="loss is NaN", traceback="Traceback: ...", timestamp=1767225600)
FLAT = json.dumps({"message": "gave up", "timestamp": "10"})


def ended(error: WorkerError | None, exit_code: int = 1) -> RunResult:
    cause = Failure(attempt=1, node="node-2", rank=5, local_rank=1, pid=4005, at=19.9, exit_code=exit_code, error=error)
    return RunResult(exit_code=1, why="", seconds=20.0, restarts=0, attempts=(), cause=cause)


def copied(path: Path, result: RunResult) -> list[str]:
    """What is warned of."""
    warnings: list[str] = []
    leave_copy(result, {VARIABLE: str(path)}, warnings.append)
    return warnings


def test_the_copy_has_the_message_and_the_time_of_the_workers_file(tmp_path):
    """From what is known of the failure: the file itself may be on another node. The exit code is added."""
    path = tmp_path / "error.json"
    assert copied(path, ended(NAN, -11)) == []
    assert json.loads(path.read_text()) == {
        "message": {
            "message": "ValueError: loss is NaN",
            "extraInfo": {"py_callstack": "Traceback: ...", "timestamp": "1767225600"},
            "errorCode": -11,
        }
    }


def test_a_flat_file_stays_flat(tmp_path):
    """It has no place for an exit code."""
    path = tmp_path / "error.json"
    copied(path, ended(error_file.parse(FLAT), 3))
    assert json.loads(path.read_text()) == json.loads(FLAT)


def test_a_copy_from_before_is_overwritten(tmp_path):
    """It is of another failure."""
    path = tmp_path / "error.json"
    path.write_text("old, and longer than what comes " * 100)
    copied(path, ended(NAN))
    assert json.loads(path.read_text())["message"]["errorCode"] == 1


@pytest.mark.parametrize(
    "result",
    [
        ended(None, -11),
        ended(None, 7),
        RunResult(exit_code=0, why="", seconds=1.0, restarts=0, attempts=(), cause=None),
    ],
    ids=["signal", "sys.exit", "finished"],
)
def test_without_an_error_there_is_no_copy(tmp_path, result):
    """As of torchrun: only an error file has a copy."""
    path = tmp_path / "error.json"
    assert copied(path, result) == []
    assert not path.exists()


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}])
def test_nobody_asked_for_a_copy(tmp_path, monkeypatch, environ):
    """Nothing is written anywhere."""
    monkeypatch.chdir(tmp_path)
    leave_copy(ended(NAN), environ, pytest.fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "why"), [("no/such/folder/error.json", "No such file or directory"), (".", "Is a directory")]
)
def test_a_copy_that_cannot_be_written_is_one_warning(tmp_path, path, why):
    """The run failed for another reason; its report and its exit code stay as they are."""
    (warning,) = copied(tmp_path / path, ended(NAN))
    assert warning == f"cannot write {tmp_path / path} (TORCHELASTIC_ERROR_FILE): {why}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this machine has no /dev/full")
def test_a_full_disk_is_one_warning():
    """Likewise."""
    (warning,) = copied(Path("/dev/full"), ended(NAN))
    assert warning.endswith("No space left on device")
