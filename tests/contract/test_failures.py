"""Failing workers: exit codes, error files, reports, restarts, and what happens to the other workers."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.contract.launchers import SCRIPTS, Launcher, Run, together
from tests.contract.shared import on_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

SHELL = ("--no-python", SCRIPTS / "fail.sh")
ON_THE_CLUSTER = ("raise", "once")
"""Failures of raylaunch that also have to be told by way of Ray, like those of several nodes."""


@pytest.fixture(scope="module")
def failed(launcher: Launcher) -> dict[str, Run]:
    """Start a run for every kind of failure, a few at a time."""
    commands: dict[str, tuple[object, ...]] = {
        "raise": ("--nproc-per-node", 2, SCRIPTS / "fail.py", "raise"),
        "sys.exit": (SCRIPTS / "fail.py", "exit"),
        "segfault": (*SHELL, "segfault"),
        "flat-int": (*SHELL, "flat-int"),
        "flat-text": (*SHELL, "flat-text"),
        "missing binary": ("--no-python", "no-such-program"),
        "always": ("--nproc-per-node", 2, "--max-restarts", 2, "--redirects", 3, *SHELL, "always"),
        "late": ("--nproc-per-node", 2, *SHELL, "late"),
        "once": ("--nproc-per-node", 2, "--max-restarts", 3, *SHELL, "once"),
    }
    if launcher.ours:
        commands["missing script"] = ("no-such-script.py",)
        commands |= {kind: (*SHELL, kind) for kind in ("malformed", "no-message")}
        lost = {
            f"an agent of {nnodes}": lambda nnodes=nnodes: lose_an_agent(launcher, nnodes) for nnodes in ("2", "1:2")
        }
    else:
        lost = {}
    tasks = {
        name: lambda argv=argv, name=name: start(launcher, *argv, local=name not in ON_THE_CLUSTER)
        for name, argv in commands.items()
    }
    return together(tasks | lost | {"two nodes": lambda: on_nodes(launcher, "2", 1, *map(str, SHELL), "exit")})


def start(launcher: Launcher, *argv: object, local: bool) -> Run:
    """Run with TORCHELASTIC_ERROR_FILE set for the launcher itself."""
    folder = launcher.new_folder()
    parents = {"TORCHELASTIC_ERROR_FILE": str(folder / "parents.json")}
    return launcher.run(
        "--log-dir", "logs", *argv, env=parents, folder=folder, torch="fail.py" in str(argv), local=local
    )


def starts(run: Run, rank: int) -> list[str]:
    """Return TORCHELASTIC_RESTART_COUNT of each start of a worker."""
    return (run.folder / f"starts-{rank}").read_text().split()


def error_file(run: Run) -> dict:
    """Return the error file that a worker wrote."""
    (path,) = run.files("error.json")
    return json.loads(path.read_text())


KINDS = ("raise", "sys.exit", "segfault", "flat-int", "flat-text", "missing binary", "always", "late")


POINTLESS = ("missing binary", "always")
"""What would fail in the same way again: raylaunch says so by an exit code of its own."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_exit_code_is_1_whatever_the_workers_was(failed: dict[str, Run], launcher: Launcher, kind: str) -> None:
    assert failed[kind].code == (93 if launcher.ours and kind in POINTLESS else 1), failed[kind].said


def test_nodes_do_not_wait_for_each_other_when_they_fail(failed: dict[str, Run]) -> None:
    """The job fails long before torchrun's exit barrier of five minutes is over."""
    run = failed["two nodes"]
    assert [one.code for one in (run, *run.peers)] == [1] * (1 + len(run.peers)), run.said


def test_an_exception_is_in_the_error_file(failed: dict[str, Run]) -> None:
    """The error file has the format of `@record`."""
    message = error_file(failed["raise"])["message"]
    assert message["message"] == "RuntimeError: no such shard"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert 'raise RuntimeError("no such shard")' in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 1_700_000_000


def test_the_parent_gets_a_copy_of_the_root_cause(launcher: Launcher, failed: dict[str, Run]) -> None:
    """It contains the worker's exit code. raylaunch's has the whole traceback; `@record` omits `<module>`."""
    run = failed["raise"]
    original, copy = error_file(run)["message"], run.answer("parents")["message"]
    assert (copy["message"], copy["errorCode"]) == (original["message"], 1)
    theirs, ours = (found["extraInfo"]["py_callstack"].splitlines() for found in (original, copy))
    assert ours[-3:] == theirs[-3:]
    assert launcher.ours or copy == original | {"errorCode": 1}


def test_the_parent_gets_the_flat_form_as_it_is(failed: dict[str, Run]) -> None:
    for kind in ("flat-int", "flat-text"):
        assert failed[kind].answer("parents") == error_file(failed[kind])


def test_the_report_of_an_exception(failed: dict[str, Run]) -> None:
    """The report has every field of torchrun's report."""
    text = failed["raise"].err
    root = text[text.rindex("Root Cause (first observed failure):") :]
    (path,) = failed["raise"].files("error.json")
    assert re.search(r"^ +time +: \d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", root, re.MULTILINE)
    assert re.search(r"^ +host +: \S+", root, re.MULTILINE)
    assert re.search(r"^ +rank +: 1 \(local_rank: 1\)", root, re.MULTILINE)
    assert re.search(r"^ +exitcode +: 1 \(pid: \d+\)", root, re.MULTILINE)
    assert re.search(
        rf"^ +error_file: \S*{re.escape(str(path.relative_to(failed['raise'].folder)))}", root, re.MULTILINE
    )
    assert re.search(r"^ +traceback : Traceback \(most recent call last\):", root, re.MULTILINE)
    assert "RuntimeError: no such shard" in root


def test_the_others_are_ended_with_their_children(failed: dict[str, Run]) -> None:
    """Rank 0 and its child would sleep for ten minutes."""
    pids = [int(word) for word in (failed["raise"].folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert failed["raise"].alive(*pids) == []


@pytest.mark.torchrun_has("--signals-to-handle")  # reports had less before
def test_who_was_ended_by_us(launcher: Launcher, failed: dict[str, Run]) -> None:
    """torchrun lists it as a failure; raylaunch says only that it stopped it."""
    assert bool(re.search(r"exitcode +: -15", failed["raise"].err)) is not launcher.ours


@pytest.mark.torchrun_has("--signals-to-handle")  # reports had less before
def test_a_signal_is_named_in_the_report(failed: dict[str, Run]) -> None:
    run = failed["segfault"]
    (found,) = re.findall(r"Signal 11 \(SIGSEGV\) received by PID (\d+)", run.err)
    assert re.search(rf"exitcode  : -11 \(pid: {found}\) +\(SIGSEGV\)", run.err), run.said


def test_a_worker_with_no_error_file(failed: dict[str, Run]) -> None:
    """The report names no error file, and none is copied."""
    run = failed["segfault"]
    assert "error_file: <N/A>" in run.err, run.said
    assert not (run.folder / "parents.json").exists()


def test_a_workers_exit_code_is_in_the_report(failed: dict[str, Run]) -> None:
    for kind in ("sys.exit", "two nodes"):
        assert re.search(r"exitcode  : 138 \(pid: \d+\)", failed[kind].err), failed[kind].said


def test_an_exit_is_no_exception(failed: dict[str, Run]) -> None:
    """`sys.exit(138)` writes no error file, with `@record` or without."""
    for kind in ("sys.exit", "always"):
        assert failed[kind].files("error.json") == []


@pytest.mark.parametrize("kind", ["flat-int", "flat-text"])
def test_the_flat_form_of_an_error_file(failed: dict[str, Run], kind: str) -> None:
    """`{"message": text, "timestamp": seconds}`, where the seconds are a number or a text."""
    assert "flat words" in failed[kind].err, failed[kind].said
    assert "exitcode  : 3" in failed[kind].err


@pytest.mark.raylaunch_only("raises its own parser's exception instead of a report")
@pytest.mark.parametrize("kind", ["malformed", "no-message"])
def test_an_error_file_that_cannot_be_read(failed: dict[str, Run], kind: str) -> None:
    """The report says so, and contains everything else."""
    run = failed[kind]
    assert run.code == 1, run.said
    assert "Traceback" not in run.err, run.said
    assert "cannot be read" in run.err, run.said
    assert "exitcode  : 3" in run.err


def test_a_program_that_is_not_there(failed: dict[str, Run]) -> None:
    assert "no-such-program" in failed["missing binary"].err
    assert "No such file or directory" in failed["missing binary"].err, failed["missing binary"].said


@pytest.mark.raylaunch_only("finds out when its worker does, and fails as for any other reason")
def test_a_script_that_is_not_there(failed: dict[str, Run]) -> None:
    """raylaunch notices it before it starts anything."""
    run = failed["missing script"]
    assert run.code == 2, run.said
    assert "no-such-script.py" in run.err, run.said


def test_restarts_are_used_up_and_then_the_job_fails(failed: dict[str, Run]) -> None:
    for rank in (0, 1):
        assert starts(failed["always"], rank) == ["0", "1", "2"]


def test_a_worker_that_is_killed_is_started_again(failed: dict[str, Run]) -> None:
    """All workers are restarted: one of the three restarts is used, and the job succeeds."""
    run = failed["once"]
    assert run.code == 0, run.said
    assert [starts(run, rank) for rank in (0, 1)] == [["0", "1"], ["0", "1"]]


def test_each_attempt_keeps_its_files(failed: dict[str, Run]) -> None:
    assert len(failed["always"].files("stdout.log")) == 3 * 2


@pytest.mark.raylaunch_only("nobody notices that an agent was killed, and its workers live on")
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_a_killed_agent_is_replaced_or_done_without(failed: dict[str, Run], nnodes: str) -> None:
    """This uses no restart, and the job succeeds."""
    run = failed[f"an agent of {nnodes}"]
    assert run.code == 0, run.said
    assert (run.folder / "go").exists()


def lose_an_agent(launcher: Launcher, nnodes: str) -> Run:
    """Kill the agent of one of two nodes when both run their worker."""
    flags = ("--nnodes", nnodes, "--nproc-per-node", 1, "--max-restarts", 0, "--set", "last_call=1")
    run = launcher.start(*flags, SCRIPTS / "lose.py").wait_for("up-0", "up-1")
    agent = agent_of(int((run.folder / "up-1").read_text()))
    (run.folder / "go").touch()
    os.kill(agent, signal.SIGKILL)
    return run.wait()


def agent_of(pid: int) -> int:
    """Return the pid of the Ray worker process that is an ancestor of a worker."""
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
