"""The report at the end of a run, as golden texts, and the copy of the error file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raylaunch.cli.output.report import ERROR_FILE_VARIABLE, report, write_error_file
from raylaunch.core.failures import error_file
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.record.attempt import Attempt
from raylaunch.core.record.result import RunResult

TRACE = """Traceback (most recent call last):
  File "/home/ana/train.py", line 88, in <module>
    main()
  File "/home/ana/train.py", line 61, in main
    raise ValueError("loss is NaN at step 3")
ValueError: loss is NaN at step 3
"""
BEGAN = "2026-01-01T00:00:00+00:00"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:{port}"


@pytest.fixture(autouse=True)
def _in_kathmandu(monkeypatch) -> Iterator[None]:
    """Set the time zone: reports show local time."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def dead(rank: int, at: float, **more) -> Failure:
    folder = f"/home/ana/runs/train/7/attempt-2/rank-{rank}"
    body = {
        "attempt": 2,
        "node": f"node-{rank // 4 + 1}",
        "host": f"gpu-{rank // 4 + 1}",
        "rank": rank,
        "local_rank": rank % 4,
        "pid": 4000 + rank,
        "at": at,
        "exit_code": 1,
        "stdout": f"{folder}/stdout.log",
        "stderr": f"{folder}/stderr.log",
        "error_file": f"{folder}/error.json" if "error" in more or "spoilt" in more else "",
    }
    return Failure(**(body | more))


def raised(kind: str, message: str, trace: str = "", **more) -> dict[str, object]:
    return {"error": WorkerError(type=kind, message=message, traceback=trace, **more)}


def ended(
    why: str, failures: list[Failure], *, code: int = 1, cause: Failure | None = None, nodes: int = 2
) -> RunResult:
    roster = tuple(f"node-{number + 1}" for number in range(nodes))
    first = Attempt(
        number=1,
        roster=roster,
        launched_at=3.0,
        running_at=3.1,
        ended_at=12.4,
        why_launched="2 of 2 nodes; node-2 joined",
        why_ended="rank 1 on node-1 was killed by SIGKILL; restart 1 of 1",
        failures=(),
    )
    second = Attempt(
        number=2,
        roster=roster,
        launched_at=12.4,
        running_at=12.5,
        ended_at=20.0,
        why_launched=first.why_ended,
        why_ended=why,
        failures=tuple(failures),
    )
    return RunResult(
        exit_code=code,
        why=why,
        seconds=20.3,
        restarts=1,
        attempts=(first, second),
        cause=cause,
        addresses={node: f"10.0.0.{number + 1}" for number, node in enumerate(roster)},
        run_dir="/home/ana/runs/train/7",
        began=BEGAN,
    )


def failed(reason: str, cause: Failure, *others: Failure, nodes: int = 2) -> str:
    """Return the report of a run that this failure ended."""
    why = f"rank {cause.rank} on {cause.node} {cause.what}; {reason}"
    return report(ended(why, [*others, cause], cause=cause, nodes=nodes))


NO_RESTARTS = "no restarts were allowed"


def test_exception(golden):
    """An exception on one rank, follow-up errors on others, and stopped ranks: one cause, and the rest in groups."""
    cause = dead(5, 19.9, **raised("ValueError", "loss is NaN at step 3", TRACE))
    echoes = [dead(rank, 19.95, **raised("RuntimeError", GLOO.format(port=rank))) for rank in (0, 1, 2, 4)]
    stopped = [dead(rank, 20.1, exit_code=-15, stopped=True) for rank in (3, 6, 7)]
    golden("report_exception", failed("the only restart is used", cause, *echoes, *stopped))


def test_three_nodes_at_once(golden):
    """The cause on one node, its consequences on two, reported in any order; one rank was stopped at the end."""
    cause = dead(9, 19.900, **raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", TRACE))
    nccl = "NCCL communicator was aborted on rank {rank}."
    echoes = [
        dead(rank, 19.9 + rank / 100, **raised("DistBackendError", nccl.format(rank=rank)))
        for rank in range(12)
        if rank not in (7, 9)
    ]
    stopped = dead(7, 20.1, exit_code=-9, stopped=True)
    golden("report_three_nodes", failed("no restarts were allowed", cause, stopped, *echoes, nodes=3))


def test_signal(golden):
    """A death by signal: its name, and the last lines of stderr in place of a traceback."""
    cause = dead(1, 19.0, exit_code=-11, tail="Fatal Python error: Segmentation fault\n\nCurrent thread: ...")
    golden("report_signal", failed(NO_RESTARTS, cause))


def test_exit_code(golden):
    """A worker that exits with a code of its own."""
    golden("report_exit_code", failed("the same failure 3 times within 60 s", dead(0, 19.0, exit_code=7)))


def test_exit_code_of_a_shell(golden):
    """A shell command that reports the death of its child, with its stderr."""
    tail = "./run.sh: line 3:  4711 Segmentation fault      python train.py"
    golden("report_shell", failed(NO_RESTARTS, dead(0, 19.0, exit_code=139, tail=tail)))


def test_import_error(golden):
    """The script cannot start on a node without a package."""
    trace = (
        'Traceback (most recent call last):\n  File "/home/ana/train.py", line 3, in <module>\n'
        "    import flash_attn\nModuleNotFoundError: No module named 'flash_attn'\n"
    )
    cause = dead(4, 12.7, **raised("ModuleNotFoundError", "No module named 'flash_attn'", trace))
    others = [replace(cause, rank=rank, local_rank=rank % 4, at=12.8) for rank in (5, 6, 7)]
    golden("report_import_error", failed("a restart cannot mend ModuleNotFoundError", cause, *others))


def test_missing_script(golden):
    """A worker that could not start has a message and no traceback."""
    cause = dead(0, 12.5, **raised("CannotBeginError", "no script `tran.py` in /home/ana", hopeless=True))
    golden("report_missing_script", failed("a restart cannot mend that", cause))


def test_out_of_memory(golden):
    """The kernel says that it killed the worker."""
    evidence = "out of memory: the kernel killed it at its container's limit, 63211 MiB resident"
    golden("report_out_of_memory", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9, evidence=evidence)))


def test_perhaps_out_of_memory(golden):
    """The kernel killed some process and does not say which: the report states only that."""
    evidence = "the kernel killed 1 process of this container for lack of memory meanwhile"
    golden("report_perhaps_out_of_memory", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9, evidence=evidence)))


def test_killed_without_evidence(golden):
    """Without evidence, the same signal is only a kill."""
    golden("report_killed", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9)))


def test_malformed_error_file(golden):
    """The problem is reported beside the facts; the exit code is the worker's own."""
    cause = dead(1, 19.0, exit_code=3, spoilt="it is not JSON: Expecting value: line 1 column 1 (char 0)", tail="oh")
    golden("report_malformed_error_file", failed(NO_RESTARTS, cause))


def test_error_file_of_a_killed_worker(golden):
    """Both the signal and the error file are reported."""
    cause = dead(1, 19.0, exit_code=-11, **raised("ValueError", "loss is NaN", TRACE, from_file=True))
    golden("report_killed_with_error_file", failed(NO_RESTARTS, cause))


def test_flat_error_file(golden):
    """An error file of another program: several lines of text and no traceback."""
    golden("report_flat_error_file", failed(NO_RESTARTS, dead(1, 19.0, **raised("error", "gave up\nat step 3"))))


def test_many_restarts(golden):
    """A long list of attempts is cut in the middle; events.jsonl has all of them."""
    cause = dead(1, 1000.0, exit_code=7, attempt=40)
    killed = "rank 1 on node-1 was killed by SIGKILL"
    attempts = tuple(
        Attempt(
            number=number,
            roster=("node-1",),
            launched_at=number * 20.0,
            running_at=number * 20.0 + 0.1 if number != 3 else None,
            ended_at=number * 20.0 + 19.9,
            why_launched="",
            why_ended=f"{killed}; restart {number} of 39" if number < 40 else f"{killed}; all 39 restarts are used",
            failures=(cause,) if number == 40 else (),
        )
        for number in range(1, 41)
    )
    whole = ended("", [], cause=cause)
    why = f"rank 1 on node-1 {cause.what}; all 39 restarts are used"
    golden("report_many_restarts", report(replace(whole, attempts=attempts, restarts=39, why=why, seconds=1000.5)))


def test_nothing_is_kept(golden):
    """A run without a run folder names no files, but shows the last lines of stderr."""
    cause = dead(1, 19.0, exit_code=3, stdout="", stderr="", tail="no such shard: 7")
    why = f"rank 1 on node-1 {cause.what}; {NO_RESTARTS}"
    golden("report_nothing_kept", report(replace(ended(why, [cause], cause=cause), run_dir="")))


def test_times_without_a_start_time():
    """Without the start time, as in a journal that lost its first line, the report counts from the start of the run."""
    cause = dead(1, 19.0, exit_code=7)
    text = report(replace(ended("", [cause], cause=cause), began=""))
    assert "\n  time      : 19.000 s after the start of the run (6.500 s after its start)\n" in text


def test_the_cause_is_in_the_first_line_and_names_are_torchruns():
    """The fields that people search for have torchrun's names."""
    cause = dead(1, 19.0, exit_code=-11)
    lines = failed(NO_RESTARTS, cause).splitlines()
    assert lines[0] == "error: rank 1 was killed by SIGSEGV (attempt 2)"
    for line in (
        "  time      : 2026-01-01_05:45:19 (6.500 s after its start)",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -11 (pid: 4001) (SIGSEGV)",
        "  error_file: <N/A>",
        "  traceback : Signal 11 (SIGSEGV) received by PID 4001",
    ):
        assert line in lines


def test_finished(golden):
    """A run that survived a kill: each attempt, and what the restart cost."""
    golden("report_finished", report(ended("all 8 workers finished", [], code=0)))


def test_a_long_run_has_minutes():
    """Times are written as everywhere else."""
    found = report(replace(ended("all 8 workers finished", [], code=0), seconds=166.1, restarts=0))
    assert found == "all 8 workers finished in 2 min 46 s, no restarts\n"


TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = StackGroup(
    ranks=(0, 1, 2, 4, 5, 6, 7),
    frames=(
        f"{TORCH}/distributed/distributed_c10d.py:3252 in all_reduce",
        f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
        "/home/ana/train.py:41 in main",
        "/home/ana/train.py:88 in <module>",
    ),
)
HUNG = {"exit_code": -9, "hung": "no step for 2.1 s, at train.py:33 in fetch", "hung_at": "/home/ana/train.py:33"}


def hung(cause: Failure, groups: tuple[StackGroup, ...], **facts) -> str:
    others = [dead(rank, 20.1, exit_code=-15, stopped=True) for rank in range(8) if rank != cause.rank]
    why = f"rank {cause.rank} on {cause.node} {cause.what}; the only restart is used"
    whole = ended(why, [*others, cause], cause=cause)
    first, last = whole.attempts
    attempts = (
        replace(first, world_size=8, steps=120, first_step=0, last_step=119),
        replace(last, world_size=8, steps=30, lost_steps=3, pause=0.9, stacks=groups),
    )
    return report(replace(whole, attempts=attempts, **facts))


def test_a_hang(golden):
    """Which rank hung, where, and what the others waited in."""
    fetch = StackGroup(ranks=(3,), frames=("/home/ana/train.py:33 in fetch", "/home/ana/train.py:88 in <module>"))
    golden("report_hung", hung(dead(3, 17.4, **HUNG), (fetch, REDUCE)))


def test_a_hang_of_a_stopped_process(golden):
    """A stopped process cannot report its stack."""
    group = StackGroup(ranks=(3,), frames=(), note="stopped by a signal")
    cause = dead(3, 17.4, exit_code=-9, hung="no step for 2.1 s, stopped by a signal", stdout="", stderr="")
    golden("report_hung_stopped", hung(cause, (group, REDUCE)))


def test_stacks_of_many_kinds_are_cut():
    """Many groups and deep stacks are cut; the file, if there is one, has all."""
    deep = tuple(f"/home/ana/train.py:{line} in f{line}" for line in range(15))
    groups = tuple(StackGroup(ranks=(rank,), frames=deep[rank:]) for rank in range(10))
    text = hung(dead(0, 17.4, **HUNG), groups)
    assert "      /home/ana/train.py:11 in f11\n      ... 3 more calls\n" in text
    assert "    ... 2 more groups; all are in stacks.txt\n" in text
    assert "    ... 2 more groups\n" in hung(dead(0, 17.4, **HUNG), groups, run_dir="")


def test_an_elastic_run(golden):
    """Each attempt with its number of workers, its steps, and what the change cost."""
    whole = ended("all 12 workers finished", [], code=0)
    first, last = whole.attempts
    third = replace(last, number=3, why_ended="", world_size=12, steps=40, lost_steps=0, pause=0.4)
    never = replace(last, running_at=None, world_size=4, why_ended="node-3 joined")
    first = replace(first, world_size=8, steps=1, why_ended="node-2 was lost: nothing was heard of it for 5 s")
    golden("report_elastic", report(replace(whole, attempts=(first, never, third), restarts=2)))


def test_takeovers():
    """How many there were is part of the outcome."""
    result = replace(ended("all 8 workers finished", [], code=0), restarts=0, attempts=())
    assert "takeover" not in report(result)
    assert report(replace(result, takeovers=2)).splitlines()[0].endswith("s, no restarts, 2 takeovers")


def test_unavailable(golden):
    """Nodes that did not join: what was requested, and what there is room for."""
    why = (
        "1 of 2 nodes after 300 s\n"
        "requested: 2 nodes with 8 workers each (8 GPUs and 8 CPUs per node), on different Ray nodes\n"
        "room for: 1 of 2 nodes"
    )
    golden("report_unavailable", report(ended(why, [], code=3)))


def test_stopped(golden):
    """A run that the user stopped is not reported as an error."""
    golden("report_stopped", report(ended("stopped by SIGINT", [], code=130)))


# The copy of the error file.

NAN = WorkerError(type="ValueError", message="loss is NaN", traceback="Traceback: ...", timestamp=1767225600)
FLAT = json.dumps({"message": "gave up", "timestamp": "10"})


def run_that_failed(error: WorkerError | None, exit_code: int = 1) -> RunResult:
    cause = Failure(attempt=1, node="node-2", rank=5, local_rank=1, pid=4005, at=19.9, exit_code=exit_code, error=error)
    return RunResult(exit_code=1, why="", seconds=20.0, restarts=0, attempts=(), cause=cause)


def copied(path: Path, result: RunResult) -> list[str]:
    """Write the copy and return the warnings."""
    warnings: list[str] = []
    write_error_file(result, {ERROR_FILE_VARIABLE: str(path)}, warnings.append)
    return warnings


def test_the_copy_has_the_message_and_the_time_of_the_workers_file(tmp_path):
    """The copy is made from the failure, since the file may be on another node. The exit code is added."""
    path = tmp_path / "error.json"
    assert copied(path, run_that_failed(NAN, -11)) == []
    assert json.loads(path.read_text()) == {
        "message": {
            "message": "ValueError: loss is NaN",
            "extraInfo": {"py_callstack": "Traceback: ...", "timestamp": "1767225600"},
            "errorCode": -11,
        }
    }


def test_a_flat_file_stays_flat(tmp_path):
    """A flat file has no place for an exit code."""
    path = tmp_path / "error.json"
    copied(path, run_that_failed(error_file.parse(FLAT), 3))
    assert json.loads(path.read_text()) == json.loads(FLAT)


def test_a_copy_from_before_is_overwritten(tmp_path):
    """An old file belongs to another failure."""
    path = tmp_path / "error.json"
    path.write_text("old, and longer than what comes " * 100)
    copied(path, run_that_failed(NAN))
    assert json.loads(path.read_text())["message"]["errorCode"] == 1


@pytest.mark.parametrize(
    "result",
    [
        run_that_failed(None, -11),
        run_that_failed(None, 7),
        RunResult(exit_code=0, why="", seconds=1.0, restarts=0, attempts=(), cause=None),
    ],
    ids=["signal", "sys.exit", "finished"],
)
def test_without_an_error_there_is_no_copy(tmp_path, result):
    """As with torchrun, only an error file is copied."""
    path = tmp_path / "error.json"
    assert copied(path, result) == []
    assert not path.exists()


@pytest.mark.parametrize("environ", [{}, {ERROR_FILE_VARIABLE: ""}])
def test_without_the_variable_there_is_no_copy(tmp_path, monkeypatch, environ):
    """Without the variable, nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_error_file(run_that_failed(NAN), environ, pytest.fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "why"), [("no/such/folder/error.json", "No such file or directory"), (".", "Is a directory")]
)
def test_a_copy_that_cannot_be_written_is_one_warning(tmp_path, path, why):
    """A copy that cannot be written is only a warning: the report and the exit code stay the same."""
    (warning,) = copied(tmp_path / path, run_that_failed(NAN))
    assert warning == f"cannot write {tmp_path / path} (TORCHELASTIC_ERROR_FILE): {why}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this machine has no /dev/full")
def test_a_full_disk_is_one_warning():
    """A full disk is only a warning, too."""
    (warning,) = copied(Path("/dev/full"), run_that_failed(NAN))
    assert warning.endswith("No space left on device")


def test_text_that_a_terminal_must_not_get():
    """From exceptions, host names, addresses and paths."""
    evil = "caf\udce9\x1b[2J\rb\u202e"
    cause = dead(1, 5.0, host=f"h{evil}", tail=f"t{evil}", **raised(f"E{evil}", f"m{evil}\nn", f"File x\n{evil}\n"))
    text = report(ended(f"why{evil}", [cause, dead(2, 6.0, exit_code=3, evidence=evil)], cause=cause))
    assert not set(text) & set("\udce9\x1b\r\u202e")
    assert r"raised E" in text
    assert r"caf\xe9\x1b[2J\rb\u202e" in text
    assert text.encode()
    unavailable = report(replace(ended(f"no nodes: {evil}\nmore", []), cause=None, exit_code=3))
    assert unavailable == "error: no nodes: caf\\xe9\\x1b[2J\n  b\\u202e\n  more\n"
