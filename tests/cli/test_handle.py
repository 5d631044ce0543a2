"""`raylaunch.start`: a handle of a run that goes on in a thread. What a run itself does is replaced here."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import raylaunch
from raylaunch.cli import api
from raylaunch.cluster.control.control_messages import (
    GetState,
    ListLogs,
    LogsListed,
    LogsRead,
    ReadLogs,
    RunState,
    StopRun,
)
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.history.run_status import StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.machine.state import Phase
from raylaunch.core.placement.plan import make_plan
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ClusterError, InterruptedByUserError
from raylaunch.node.logs import log_files
from tests.cli.runs.made_runs import make_folder

SECONDS = 100.0
"""How long anything here may take at most."""


class FakeRun:
    """Stands for `run_job`: it goes on until it is told its end, or is requested to stop.

    Until then it answers as a driver does whose agents have the files in `nodes`, a folder.
    """

    def __init__(self):
        self.may_end = threading.Event()
        self.is_up = threading.Event()
        self.begins = True
        self.changes = []
        self.error = None
        self.nodes = self.folder = ""
        self.is_over = False

    def __call__(self, job, text, observer, *, payload, on_control, conclude, capabilities, given):
        del text, conclude, capabilities, given
        if self.folder:
            observer.on_plan(job, make_plan(job, (local_machine.facts(job),), local=True), self.folder)
        if self.begins:
            on_control(self)
            self.is_up.set()
        assert self.may_end.wait(SECONDS)
        self.is_over = True
        if self.error is not None:
            raise self.error
        if self.changes:
            message = f"stopped by {self.changes[0].by}"
            raise InterruptedByUserError(message)
        values = {rank: bytearray(pickle.dumps(rank * 10)) for rank in (1, 0)} if payload else {}
        result = RunResult(exit_code=0, why="all finished", seconds=1.0, restarts=0, attempts=(), cause=None)
        return RunOutcome(result=result, values=values)

    def change(self, request):
        self.changes.append(request)
        self.may_end.set()

    @property
    def run_dir(self):
        return str(self.folder)

    def answer(self, request):
        match request:
            case GetState():
                status = replace(StatusBuilder(Job()).status(), attempt=1, phase=Phase.RUNNING, world_size=2)
                return RunState(status=status, log_layout="raylaunch", keeps_logs=True)
            case ListLogs():
                return LogsListed(spans=tuple(log_files.spans(self.nodes, "raylaunch", request.query)))
            case ReadLogs():
                found = log_files.blocks(self.nodes, "raylaunch", request.attempt, request.spans)
                return LogsRead(blocks=tuple(found), rest=())


@pytest.fixture
def run(monkeypatch):
    found = FakeRun()
    monkeypatch.setattr(api, "run_job", found)
    yield found
    found.may_end.set()


def test_a_handle_is_there_at_once_and_has_the_results_later(run):
    """Results by rank. Until then it says that it has not ended."""
    handle = raylaunch.start(print)
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s; it goes on"):
        handle.result(timeout=0.01)
    run.may_end.set()
    assert handle.result(SECONDS) == [0, 10]
    assert handle.done()


def test_a_program_gives_the_result_of_its_run(run, tmp_path):
    """As `launch` does; its path may be a `Path`."""
    script = tmp_path / "train.py"
    script.touch()
    run.may_end.set()
    assert raylaunch.start(script=script, args=["--lr", 0.1]).result(SECONDS).why == "all finished"
    assert raylaunch.launch(command="true").ok


def test_a_program_that_is_not_there_is_refused_before_anything_is_started(monkeypatch, tmp_path):
    """And so is a command with its arguments in it, whose hint is about Python."""
    monkeypatch.setattr(api, "run_job", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(raylaunch.ConfigError, match=r"`tran.py` does not exist\nhint: did you mean `train.py`"):
        raylaunch.start(script="tran.py")
    with pytest.raises(raylaunch.ConfigError, match=r"without its arguments\nhint: its arguments are `args=\[...\]`"):
        raylaunch.launch(command="true --epochs 1")


@pytest.mark.parametrize("is_early", [False, True])
def test_stop_requests_what_the_command_requests(run, is_early):
    """Also before the run can take it. The result is an error that is no KeyboardInterrupt, which ends event loops."""
    handle = raylaunch.start(print)
    assert is_early or run.is_up.wait(SECONDS)
    with pytest.raises(ValueError, match="not -1"):
        handle.stop(grace=-1)
    handle.stop(grace=7)
    with pytest.raises(raylaunch.RunStoppedError, match=r"stopped by Handle\.stop"):
        handle.result(SECONDS)
    handle.stop(now=True)
    assert run.changes == [StopRun(by="Handle.stop", save_seconds=7)]
    assert (handle.status().state, handle.status().why) == ("stopped", "stopped by Handle.stop")


def test_logs_come_from_all_nodes_while_the_run_lasts(run, tmp_path):
    """Then from the run folder, which may have those of this machine only."""
    run.nodes, run.folder = str(tmp_path / "nodes"), str(make_folder(tmp_path / "run", lines=5))
    for folder, ranks in ((run.nodes, (0, 1)), (run.folder, (1,))):
        for rank in ranks:
            where = Path(folder) / "attempt-1" / f"rank-{rank}"
            where.mkdir(parents=True)
            (where / "stdout.log").write_text(f"rank {rank}\n")
    handle = raylaunch.start(print)
    assert run.is_up.wait(SECONDS)
    assert handle.logs() == "[0] rank 0\n[1] rank 1\n"
    assert handle.status().state == Phase.RUNNING
    run.may_end.set()
    handle.result(SECONDS)
    assert handle.logs() == "[1] rank 1\n"


def test_several_tasks_wait_for_several_runs(run):
    """A task that is cancelled ends neither the run nor the waiting of others."""

    async def main():
        handles = [raylaunch.start(print) for _ in range(2)]
        impatient = asyncio.ensure_future(asyncio.wait_for(handles[0], 0.01))
        with pytest.raises(asyncio.TimeoutError):
            await impatient
        assert not handles[0].done()
        asyncio.get_running_loop().call_later(0.01, run.may_end.set)
        return await asyncio.wait_for(asyncio.gather(*handles), SECONDS)

    assert asyncio.run(main()) == [[0, 10], [0, 10]]


def test_it_can_be_begun_and_awaited_inside_a_running_loop(run):
    """As in a cell of a notebook; the loop goes on meanwhile."""

    async def main():
        handle = raylaunch.start(print)
        for _ in range(3):
            await asyncio.sleep(0)
        run.may_end.set()
        return await handle

    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(asyncio.run, main()).result(SECONDS) == [0, 10]


def test_a_run_that_never_was_has_its_error(run):
    """In `result`, and in `status`."""
    run.begins = False
    handle = raylaunch.start(print)
    shown = handle.status()
    assert (shown.state, shown.waits_for, shown.problem) == (Phase.GATHERING, "the cluster's answer", "")
    assert handle.logs() == ""
    run.error = ClusterError("there is no cluster", hint="start one")
    run.may_end.set()
    with pytest.raises(ClusterError, match="there is no cluster"):
        handle.result(SECONDS)
    shown = handle.status()
    assert (shown.state, shown.exit_code, shown.problem) == ("failed", 3, "")
    assert "there is no cluster" in shown.why
    assert repr(handle) == "<raylaunch.Handle of print: failed>"
