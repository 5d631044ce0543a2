"""What is found out about a failed worker: its report, error files in several forms, and evidence from the kernel."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from raylaunch.core.failures import error_file
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.machine.events_and_actions import WorkersExited
from raylaunch.core.machine.observe import observe
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from raylaunch.core.newtypes import NodeTime, RunTime
from raylaunch.node.supervisor import process_failure
from raylaunch.node.supervisor.process_failure import OomKills
from tests.node.harness import Node

NAN = WorkerError(type="ValueError", message="loss is NaN", traceback="Traceback: ours", timestamp=99)
RECORDED = {"message": {"message": "ValueError: loss is NaN", "extraInfo": {"py_callstack": "T", "timestamp": "10"}}}
OOM = "out of memory: reported by the kernel"


class FakeOomKills(OomKills):
    """A kernel that killed every process for lack of memory."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def evidence(self, pid: int | None) -> str:
        self.asked.append(pid)
        return OOM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the worker's files."""
    return tmp_path


def failure_of(folder: Path, exit_code: int = 1, **facts: Any) -> Failure:
    """Return the failure as the driver gets it. The node's clock is an hour ahead of the run's."""
    exited = WorkerExit(
        attempt=2,
        rank=5,
        local_rank=1,
        pid=facts.pop("pid", 4005),
        at=NodeTime(3601.5),
        exit_code=exit_code,
        stopped=facts.pop("stopped", False),
        error=facts.pop("report", None),
    )
    known: dict[str, Any] = {"oom_kills": FakeOomKills(), "of_gpus": lambda _: "", "kept": True}
    failure = process_failure.failure(exited, folder=folder, **(known | facts))
    status = WorkersStatus(attempt=2, failures=(failure,))
    (event,) = observe("node-2", WorkersStatus(), status, now=RunTime(10.0), sent_at=NodeTime(3610.0))
    assert isinstance(event, WorkersExited)
    return event.failures[0]


def write_error_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "error.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_failure_names_worker_place_and_time(folder: Path) -> None:
    """Also the host's name."""
    (folder / "stderr.log").write_text("oh\n")
    found = failure_of(folder, 7)
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


def test_an_error_file_is_written_from_a_report(folder: Path) -> None:
    """In the format of `@record`, so that tools for those files can read it."""
    found = failure_of(folder, report=NAN)
    assert found.error is not None
    assert (found.error.type, found.error.message, found.error.traceback) == (
        "ValueError",
        "loss is NaN",
        "Traceback: ours",
    )
    assert (found.error.from_file, found.spoilt) == (False, "")
    assert found.error.timestamp == NAN.timestamp
    path = folder / "error.json"
    assert found.error_file == str(path)
    left = error_file.parse(path.read_text())
    assert (left.text, left.traceback, left.timestamp) == (
        found.error.text,
        found.error.traceback,
        found.error.timestamp,
    )


def test_an_error_file_without_a_report_is_read(folder: Path) -> None:
    """For example that of a program that a command started."""
    write_error_file(folder, json.dumps(RECORDED))
    assert failure_of(folder).error == WorkerError(
        type="ValueError", message="loss is NaN", traceback="T", from_file=True, timestamp=10
    )


def test_a_report_precedes_an_error_file(folder: Path) -> None:
    """The file is not changed; its timestamp is used."""
    path = write_error_file(folder, json.dumps(RECORDED))
    found = failure_of(folder, report=NAN)
    assert found.error == WorkerError(
        type="ValueError", message="loss is NaN", traceback="Traceback: ours", timestamp=10
    )
    assert json.loads(path.read_text()) == RECORDED


def test_additional_fields_of_an_error_file_are_kept(folder: Path) -> None:
    """They are in the error file of the whole run too."""
    data = RECORDED | {"errorTraits": {"retry": "no"}}
    write_error_file(folder, json.dumps(data))
    error = failure_of(folder, report=NAN).error
    assert error is not None
    assert json.loads(error_file.compose(error)) == data


def test_an_error_file_of_another_error_is_ignored_beside_a_report(folder: Path) -> None:
    """A child process of the worker may have written it long before."""
    write_error_file(folder, json.dumps({"message": "KeyError: x", "timestamp": 10, "shard": 3}))
    error = failure_of(folder, report=NAN).error
    assert error is not None
    assert (error.type, error.written) == ("ValueError", "")
    assert error.timestamp > 10


def test_an_error_file_does_not_hide_a_signal(folder: Path) -> None:
    """Both are reported."""
    write_error_file(folder, json.dumps(RECORDED))
    found = failure_of(folder, -signal.SIGSEGV)
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
def test_a_malformed_error_file_is_reported(folder: Path, text: str | bytes, why: str) -> None:
    """The exit code is still the worker's, and the path of the file is given."""
    path = write_error_file(folder, text)
    found = failure_of(folder, 3)
    assert (found.exit_code, found.error, found.error_file) == (3, None, str(path))
    assert why in found.spoilt
    assert found.what == "exited with code 3"


def test_a_malformed_error_file_is_not_overwritten(folder: Path) -> None:
    """It may be evidence."""
    path = write_error_file(folder, "{")
    found = failure_of(folder, report=NAN)
    assert found.what == "raised ValueError: loss is NaN"
    assert found.spoilt
    assert path.read_text() == "{"


def test_an_error_file_that_is_a_folder_is_reported(folder: Path) -> None:
    """It cannot be read."""
    (folder / "error.json").mkdir()
    assert failure_of(folder, report=NAN).spoilt == "Is a directory"


def test_files_that_are_named_pipes_do_not_block(folder: Path) -> None:
    """With or without a writer."""
    for name in ("error.json", "stderr.log"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert (failure_of(folder).spoilt, failure_of(folder).tail) == ("it is not a regular file", "")
    writers = [os.open(folder / name, os.O_RDWR) for name in ("error.json", "stderr.log")]
    assert (failure_of(folder, report=NAN).spoilt, failure_of(folder).tail) == ("it is not a regular file", "")
    for writer in writers:
        os.close(writer)


def test_without_a_folder_there_is_no_error_file() -> None:
    """If no logs are kept, or the folder is gone."""
    for nowhere in (Path("/dev/null/attempt-1"), Path("/nonexistent/attempt-1")):
        found = failure_of(nowhere, report=NAN)
        assert (found.error_file, found.spoilt, found.tail) == ("", "", "")
        assert found.what == "raised ValueError: loss is NaN"


# Evidence.


def test_a_sigkill_has_the_kernels_evidence(folder: Path) -> None:
    """The kernel is asked for the worker's process id."""
    kills = FakeOomKills()
    assert failure_of(folder, -signal.SIGKILL, oom_kills=kills).what == f"was killed by SIGKILL ({OOM})"
    assert kills.asked == [4005]


def test_a_sigkill_in_a_shell_has_evidence_without_a_process_id(folder: Path) -> None:
    """The worker is the shell, and the killed process another. The same if the worker's id is not known."""
    kills = FakeOomKills()
    failure_of(folder, 137, oom_kills=kills)
    failure_of(folder, -signal.SIGKILL, pid=0, oom_kills=kills)
    assert kills.asked == [None, None]


@pytest.mark.parametrize("exit_code", [1, 9, -signal.SIGTERM, -signal.SIGABRT, -signal.SIGSEGV])
def test_only_a_sigkill_has_evidence(folder: Path, exit_code: int) -> None:
    """The kernel uses no other signal when memory runs out."""
    kills = FakeOomKills()
    assert failure_of(folder, exit_code, oom_kills=kills).evidence == ""
    assert kills.asked == []


def test_a_stopped_worker_has_no_evidence(folder: Path) -> None:
    """The supervisor itself killed it."""
    kills = FakeOomKills()
    assert failure_of(folder, -signal.SIGKILL, stopped=True, oom_kills=kills).evidence == ""
    assert kills.asked == []


def test_an_abort_by_bad_alloc_is_out_of_memory(folder: Path) -> None:
    """The C++ runtime writes the exception's name to stderr; other aborts have no evidence."""
    (folder / "stderr.log").write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert failure_of(folder, -signal.SIGABRT).what == "was killed by SIGABRT (out of memory: std::bad_alloc)"
    assert failure_of(folder, 1).evidence == ""


def test_a_bus_error_has_the_use_of_shared_memory(folder: Path) -> None:
    """Full shared memory is its commonest cause."""
    evidence = failure_of(folder, -signal.SIGBUS).evidence
    if evidence:
        assert evidence.startswith("/dev/shm: ")
        assert evidence.endswith(" MiB in use")
    assert process_failure.shared_memory_use("/nonexistent") == ""


# Of real workers.


def test_sys_exit_leaves_no_error_file(node: Node) -> None:
    """As under torchrun."""
    outcome = node.run(node.script("import sys\nsys.exit(3)"))
    assert (outcome.exit_code, outcome.failure.error, outcome.failure.error_file) == (3, None, "")
    assert not (outcome.folders[0] / "error.json").exists()


def test_an_exception_in_record_is_reported_once(torch_node: Node) -> None:
    """torch's decorator writes the error file, which is kept, and the worker reports the same exception."""
    outcome = torch_node.run(
        torch_node.script("""
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


def test_a_worker_that_is_killed_after_it_recorded_an_error(torch_node: Node) -> None:
    """The failure is the signal; the error file is mentioned."""
    outcome = torch_node.run(
        torch_node.script("""
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


GPU_FAULT = "GPU 1 does not answer"


@pytest.mark.parametrize(
    ("exit_code", "report", "tail", "known"),
    [
        (
            1,
            WorkerError(type="RuntimeError", message="CUDA error: unspecified launch failure", traceback=""),
            "",
            GPU_FAULT,
        ),
        (1, WorkerError(type="ValueError", message="loss is NaN", traceback=""), "", ""),
        (1, None, "NCCL WARN Cuda failure", GPU_FAULT),
        (-signal.SIGABRT, None, "", GPU_FAULT),
        (-signal.SIGKILL, None, "", OOM),
    ],
)
def test_what_the_driver_says_of_gpus_is_evidence_where_they_may_be_the_cause(folder, exit_code, report, tail, known):
    """And not of an exception that has nothing to do with GPUs, nor of a kill."""
    (folder / "stderr.log").write_text(tail)
    found = failure_of(folder, exit_code, report=report, of_gpus=lambda rank: GPU_FAULT if rank == 5 else "")
    assert found.evidence == known
    assert found.what.endswith(f" ({known})" if known else "NaN")
    assert failure_of(folder, exit_code, report=report, of_gpus=lambda _: GPU_FAULT, stopped=True).evidence == ""
