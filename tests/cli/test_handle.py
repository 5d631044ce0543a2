"""`raylaunch.start`: a handle of a run that goes on in a thread. What a run itself does is replaced here."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import raylaunch
from raylaunch.cli import api
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.machine.state import Phase
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ClusterError, InterruptedByUserError

SECONDS = 30.0
"""How long anything here may take at most."""


class FakeRun:
    """Stands for `run_job`: it goes on until it is told its end, or gets a signal."""

    def __init__(self):
        self.may_end = threading.Event()
        self.signals = []
        self.error = None

    def __call__(self, job, text, observer, *, payload, sent):
        del job, text, observer
        if sent is not None:
            sent.go_to(self.take)
        assert self.may_end.wait(SECONDS)
        if self.error is not None:
            raise self.error
        if self.signals:
            message = f"stopped by {self.signals[0]}"
            raise InterruptedByUserError(message)
        values = {rank: pickle.dumps(rank * 10) for rank in (1, 0)} if payload else {}
        result = RunResult(exit_code=0, why="all finished", seconds=1.0, restarts=0, attempts=(), cause=None)
        return RunOutcome(result=result, values=values)

    def take(self, name):
        self.signals.append(name)
        self.may_end.set()


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


@pytest.mark.parametrize("now", [False, True])
def test_stop_sends_the_run_a_signal_that_it_does_not_forward(run, now):
    """Twice, if it may not wait. The result is an error that is no KeyboardInterrupt, which would end an event loop."""
    handle = raylaunch.start(print, signals_to_handle=["SIGINT"], signals_to_forward=["SIGTERM"])
    handle.stop(now=now)
    with pytest.raises(raylaunch.RunStoppedError, match="stopped by SIGINT"):
        handle.result(SECONDS)
    assert run.signals == ["SIGINT"] * (2 if now else 1)
    assert (handle.status().state, handle.status().why) == (Phase.DONE, "stopped by SIGINT")


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
    handle = raylaunch.start(print)
    shown = handle.status()
    assert (shown.state, shown.waits_for, shown.problem) == (Phase.GATHERING, "the cluster's answer", "")
    assert handle.logs() == ""
    run.error = ClusterError("there is no cluster", hint="start one")
    run.may_end.set()
    with pytest.raises(ClusterError, match="there is no cluster"):
        handle.result(SECONDS)
    shown = handle.status()
    assert (shown.state, shown.exit_code, shown.problem) == (Phase.DONE, 3, "")
    assert "there is no cluster" in shown.why
    assert repr(handle) == "<raylaunch.Handle of print: done>"
