"""Signals while `raylaunch -d` starts a run: at each moment, the run is either stopped or said to go on."""

from __future__ import annotations

import signal

import pytest

from raylaunch.cli.detached import detach
from raylaunch.cli.run_once import exit_code_of
from raylaunch.cluster.detached.detached_run import DriverNews
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.errors import InterruptedByUserError

JOB = Job(entrypoint=Entrypoint(script="train.py"), run_id="r1")
BEGINS = DriverNews(begins=True)
PLANNED = DriverNews(run_id="r1", name="train", run_dir="/runs/r1")
RUNS = DriverNews(runs=True)
ENDED = DriverNews(exit_code=143)
NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def started(monkeypatch):
    """Return a function that starts a run whose driver tells these news, with signals among them.

    It returns the exit code, and which runs were stopped.
    """
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in zip(NUMBERS, (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL), strict=True):
        signal.signal(number, handler)
    stopped: list[str] = []

    def start(*told: DriverNews | signal.Signals, stops: bool = True) -> tuple[int, list[str]]:
        def news(*_):
            for each in told:
                if isinstance(each, DriverNews):
                    yield each
                elif each is Swallows:
                    Swallows()
                else:
                    signal.raise_signal(each)

        def stop(run):
            stopped.append(run.run_id)
            return stops

        monkeypatch.setattr(detach, "_news", news)
        monkeypatch.setattr(detach, "_stop", stop)
        return exit_code_of(lambda: detach.run(JOB, "", wait=True)), stopped

    yield start
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_before_the_run_begins(started, capsys, number):
    assert started(number, BEGINS, PLANNED, RUNS) == (128 + number, [])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"raylaunch: stopped by {number.name} before anything was started\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_before_the_run_has_an_id(started, capsys, number):
    """It is stopped as soon as it can be, and the command waits for its end."""
    assert started(BEGINS, number, PLANNED, RUNS, ENDED) == (128 + number, ["r1"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == f"raylaunch: stopped by {number.name} while it started"


def test_a_run_that_cannot_be_stopped_from_here(started, capsys):
    """Its id is printed, and how to stop it."""
    assert started(BEGINS, signal.SIGINT, PLANNED, stops=False) == (0, ["r1"])
    assert capsys.readouterr().out.splitlines()[::4] == ["r1", "raylaunch stop train/r1"]


def test_a_second_signal_ends_the_waiting(started, capsys):
    assert started(BEGINS, signal.SIGTERM, signal.SIGINT, PLANNED) == (130, [])
    said = capsys.readouterr()
    assert (said.out, "`raylaunch stop --now r1` ends it" in said.err) == ("", True)


@pytest.mark.parametrize("number", NUMBERS)
def test_when_there_is_a_run(started, capsys, number):
    """It ends only the waiting: the command says so, with the id of the run and how to stop it."""
    assert started(BEGINS, PLANNED, number, RUNS) == (0, [])
    said = capsys.readouterr()
    assert "train r1 goes on" in said.err
    assert said.out.splitlines()[::4] == ["r1", "raylaunch stop train/r1"]


class Swallows:
    """Python ignores what is raised while an object is freed."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("told", "code"), [((Swallows, BEGINS, PLANNED), 130), ((BEGINS, PLANNED, Swallows, RUNS), 0)])
def test_a_signal_that_comes_while_an_object_is_freed(started, capsys, told, code):
    assert started(*told) == (code, [])
    assert ("goes on" in capsys.readouterr().err) is (code == 0)


def test_when_the_id_was_printed(started, capsys):
    """What follows is the end of the process, which needs no message."""
    assert started(BEGINS, PLANNED, RUNS) == (0, [])
    signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == ""


def test_signals_that_are_ignored_stay_ignored(started):
    """As with `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert started(signal.SIGHUP, BEGINS, signal.SIGHUP, PLANNED, signal.SIGHUP, RUNS) == (0, [])


def test_in_python_the_handlers_are_restored(started, monkeypatch):
    def news(*_):
        yield BEGINS
        signal.raise_signal(signal.SIGINT)
        yield PLANNED
        yield ENDED

    monkeypatch.setattr(detach, "_news", news)
    monkeypatch.setattr(detach, "_stop", lambda _: True)
    with pytest.raises(InterruptedByUserError):
        detach.start(JOB, "")
    assert [signal.getsignal(number) for number in NUMBERS[1:]] == [signal.SIG_DFL] * 2
