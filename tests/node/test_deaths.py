"""What is found out of a dead worker: reports, error files of both forms and of none, evidence."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from raylaunch.core import error_file
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.node import deaths
from raylaunch.node.deaths import Death
from raylaunch.node.memory import KernelKills
from raylaunch.worker.spec import Report
from tests.node.harness import Node

NAN = Report(error_type="ValueError", message="loss is NaN", traceback="Traceback: ours")
RECORDED = {"message": {"message": "ValueError: loss is NaN", "extraInfo": {"py_callstack": "T", "timestamp": "10"}}}
OOM = "out of memory: told by the kernel"


class Kills(KernelKills):
    """A kernel that killed one process."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def evidence(self, pid: int | None) -> str:
        self.asked.append(pid)
        return OOM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the worker's files."""
    return tmp_path


def died(folder: Path, exit_code: int = 1, **facts: Any) -> Failure:
    death = Death(attempt=2, rank=5, local_rank=1, pid=facts.pop("pid", 4005), at=1.5)
    known = {"stopped": False, "report": Report(), "node": "node-2", "kills": Kills()}
    return deaths.failure(death, exit_code=exit_code, folder=folder, **(known | facts))


def leave(folder: Path, text: str | bytes) -> Path:
    path = folder / "error.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_who_where_and_when(folder: Path) -> None:
    """All of it, the host's own name too."""
    (folder / "stderr.log").write_text("oh\n")
    found = died(folder, 7)
    assert found == Failure(
        attempt=2,
        node="node-2",
        host=socket.gethostname(),
        rank=5,
        local_rank=1,
        pid=4005,
        at=1.5,
        exit_code=7,
        stdout=str(folder / "stdout.log"),
        stderr=str(folder / "stderr.log"),
        tail="oh",
    )
    assert not (folder / "error.json").exists()


# Error files.


def test_a_report_becomes_an_error_file(folder: Path) -> None:
    """In the form of `@record`, so that tools which read those read this."""
    before = int(time.time())
    found = died(folder, report=NAN)
    assert found.error is not None
    assert (found.error.type, found.error.message, found.error.traceback) == (
        "ValueError",
        "loss is NaN",
        "Traceback: ours",
    )
    assert (found.error.from_file, found.spoilt) == (False, "")
    assert before <= found.error.timestamp <= time.time()
    path = folder / "error.json"
    assert found.error_file == str(path)
    left = error_file.parse(path.read_text())
    assert (left.text, left.traceback, left.timestamp) == (
        found.error.text,
        found.error.traceback,
        found.error.timestamp,
    )


def test_an_error_file_alone_is_read(folder: Path) -> None:
    """As of a program that a command started."""
    leave(folder, json.dumps(RECORDED))
    assert died(folder).error == WorkerError(
        type="ValueError", message="loss is NaN", traceback="T", from_file=True, timestamp=10
    )


def test_a_report_wins_over_an_error_file(folder: Path) -> None:
    """The file is left as it is; it says the same, and when."""
    path = leave(folder, json.dumps(RECORDED))
    found = died(folder, report=NAN)
    assert found.error == WorkerError(
        type="ValueError", message="loss is NaN", traceback="Traceback: ours", timestamp=10
    )
    assert json.loads(path.read_text()) == RECORDED


def test_what_else_a_handler_wrote_goes_along(folder: Path) -> None:
    """For the copy of whoever started the run."""
    data = RECORDED | {"errorTraits": {"retry": "no"}}
    leave(folder, json.dumps(data))
    error = died(folder, report=NAN).error
    assert error is not None
    assert json.loads(error_file.compose(error)) == data


def test_an_error_file_of_something_else_is_not_mixed_in(folder: Path) -> None:
    """A child of the worker's may have written it, long before."""
    leave(folder, json.dumps({"message": "KeyError: x", "timestamp": 10, "shard": 3}))
    error = died(folder, report=NAN).error
    assert error is not None
    assert (error.type, error.written) == ("ValueError", "")
    assert error.timestamp > 10


def test_an_error_file_does_not_hide_a_signal(folder: Path) -> None:
    """Both are told."""
    leave(folder, json.dumps(RECORDED))
    found = died(folder, -signal.SIGSEGV)
    assert found.what == "was killed by SIGSEGV; its error file says that it raised ValueError: loss is NaN"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON"),
        (b"\xff\xfe", "can't decode"),
        ("[]", "it is not a JSON object"),
        ('{"message": null}', "it has no `message`"),
        ('{"message": "' + "x" * 300_000 + '"}', "it has more than 256 KiB"),
    ],
    ids=["empty", "cut", "bytes", "list", "null", "long"],
)
def test_a_malformed_error_file_is_told_and_harms_nobody(folder: Path, text: str | bytes, why: str) -> None:
    """The exit code is still the worker's, and the file is named."""
    path = leave(folder, text)
    found = died(folder, 3)
    assert (found.exit_code, found.error, found.error_file) == (3, None, str(path))
    assert why in found.spoilt
    assert found.what == "exited with code 3"


def test_a_malformed_error_file_stays_beside_a_report(folder: Path) -> None:
    """It is somebody's, and evidence."""
    path = leave(folder, "{")
    found = died(folder, report=NAN)
    assert found.what == "raised ValueError: loss is NaN"
    assert found.spoilt
    assert path.read_text() == "{"


def test_an_error_file_that_is_a_folder_is_told(folder: Path) -> None:
    """It cannot be read."""
    (folder / "error.json").mkdir()
    assert died(folder, report=NAN).spoilt == "Is a directory"


def test_an_error_file_that_is_a_pipe_holds_nobody_up(folder: Path) -> None:
    """With nobody to write into it, it is empty."""
    os.mkfifo(folder / "error.json")
    assert died(folder).spoilt == "it is empty"
    writer = os.open(folder / "error.json", os.O_RDWR)
    assert died(folder, report=NAN).spoilt == "it is empty"
    os.close(writer)


def test_no_folder_no_error_file() -> None:
    """Where no logs are kept, or the folder is gone."""
    for nowhere in (Path("/dev/null/attempt-1"), Path("/nonexistent/attempt-1")):
        found = died(nowhere, report=NAN)
        assert (found.error_file, found.spoilt, found.tail) == ("", "", "")
        assert found.what == "raised ValueError: loss is NaN"


# Evidence.


def test_a_kill_has_the_kernels_evidence(folder: Path) -> None:
    """Asked by the process id, which must be the worker's."""
    kills = Kills()
    assert died(folder, -signal.SIGKILL, kills=kills).what == f"was killed by SIGKILL ({OOM})"
    assert kills.asked == [4005]


def test_a_kill_inside_a_shell_has_evidence_without_a_process_id(folder: Path) -> None:
    """The shell is the worker, what was killed is another; and so where the worker's id is not known."""
    kills = Kills()
    died(folder, 137, kills=kills)
    died(folder, -signal.SIGKILL, pid=0, kills=kills)
    assert kills.asked == [None, None]


@pytest.mark.parametrize("exit_code", [1, 9, -signal.SIGTERM, -signal.SIGABRT, -signal.SIGSEGV])
def test_other_deaths_are_not_asked_of_the_kernel(folder: Path, exit_code: int) -> None:
    """It kills with SIGKILL only."""
    kills = Kills()
    assert died(folder, exit_code, kills=kills).evidence == ""
    assert kills.asked == []


def test_what_we_killed_has_no_evidence(folder: Path) -> None:
    """We know who did it."""
    kills = Kills()
    assert died(folder, -signal.SIGKILL, stopped=True, kills=kills).evidence == ""
    assert kills.asked == []


def test_an_abort_for_lack_of_memory_says_so_itself(folder: Path) -> None:
    """C++ has a word for it; other aborts have none."""
    (folder / "stderr.log").write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert died(folder, -signal.SIGABRT).what == "was killed by SIGABRT (out of memory: std::bad_alloc)"
    assert died(folder, 1).evidence == ""


def test_a_bus_error_tells_how_full_shared_memory_is(folder: Path) -> None:
    """The commonest reason, and a fact."""
    evidence = died(folder, -signal.SIGBUS).evidence
    if evidence:
        assert evidence.startswith("/dev/shm: ")
        assert evidence.endswith(" MiB in use")
    assert deaths._shared_memory("/nonexistent") == ""


# Of real workers.


def test_an_exit_of_its_own_leaves_no_error_file(node: Node) -> None:
    """`sys.exit` is no error of which torchrun would write."""
    outcome = node.run(node.script("import sys\nsys.exit(3)"))
    assert (outcome.exit_code, outcome.failure.error, outcome.failure.error_file) == (3, None, "")
    assert not (outcome.folders[0] / "error.json").exists()


def test_a_recorded_exception_is_told_once_and_its_file_is_left(node: Node) -> None:
    """torch's own decorator and our report, of the same exception."""
    outcome = node.run(
        node.script("""
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("loss is NaN")

        main()
    """)
    )
    path = outcome.folders[0] / "error.json"
    written = json.loads(path.read_text())["message"]
    error = outcome.failure.error
    assert error is not None
    assert (outcome.failure.error_file, error.from_file) == (str(path), False)
    copy = json.loads(error_file.compose(error, exit_code=1))["message"]
    assert copy["message"] == written["message"] == "ValueError: loss is NaN"
    assert copy["extraInfo"]["timestamp"] == written["extraInfo"]["timestamp"]
    assert "wrapper" in written["extraInfo"]["py_callstack"]


def test_a_worker_that_recorded_an_error_and_then_is_killed(node: Node) -> None:
    """It lived on after what its file tells."""
    outcome = node.run(
        node.script("""
        import os, signal
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("loss is NaN")

        try:
            main()
        except ValueError:
            os.kill(os.getpid(), signal.SIGSEGV)
    """)
    )
    failure = outcome.failure
    assert failure.signal == "SIGSEGV"
    assert failure.what.startswith("was killed by SIGSEGV; its error file says")
    assert failure.error is not None
    assert failure.error.from_file
