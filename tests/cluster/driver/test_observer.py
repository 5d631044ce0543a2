"""Observers that fail do not end a run."""

from __future__ import annotations

import time

import pytest

from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.observer import GuardedObserver
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.placement.plan import NodeFacts, make_plan
from raylaunch.node.logs.tail import LogOutput
from tests.fakes import FakeFleet, RunRecorder

JOB = Job(entrypoint=Entrypoint(script="train.py"))
NODE = NodeFacts(node_id="ab", address="10.0.0.7", cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)
OUTPUT = LogOutput(rank=0, stream="stdout", data=b"x")


class Broken(RunRecorder):
    """An observer that fails whenever it is to show anything but a message."""

    def on_plan(self, *_: object) -> None:
        raise KeyError("caf\udce9")

    def on_entry(self, *_: object) -> None:
        raise ValueError("caf\udce9")

    def on_output(self, *_: object) -> None:
        raise MemoryError


class Mute(Broken):
    """An observer that cannot even show a message."""

    def on_message(self, text: str) -> None:
        raise UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates not allowed")


def test_each_kind_of_error_is_told_once():
    """With the place that raised it."""
    broken = Broken()
    guarded = GuardedObserver(broken)
    for _ in range(3):
        guarded.on_plan(JOB, make_plan(JOB, [NODE], local=False), "")
        guarded.on_entry(None, None)
        guarded.on_output([OUTPUT])
    plan, change, output = broken.lines
    assert plan.startswith("the plan could not be shown: KeyError: ")
    assert change.startswith(f"a change of the run could not be shown: ValueError: caf\udce9 ({__file__}:")
    assert output.startswith("the output of workers could not be shown: MemoryError: ")
    assert change.endswith("; the run goes on (this is a bug in raylaunch)")


def test_an_observer_that_shows_nothing_at_all(capsys):
    """Then stderr has to do, and the text can be written to it."""
    guarded = GuardedObserver(Mute())
    guarded.on_message("hello")
    guarded.on_entry(None, None)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("raylaunch: a message could not be shown: UnicodeEncodeError: ")
    assert r"caf\xe9" in second


def test_ctrl_c_is_no_error_of_an_observer():
    class Interrupted(RunRecorder):
        def on_message(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedObserver(Interrupted()).on_message("hello")


def test_training_goes_on():
    """To the end, with a restart on the way."""
    fleet, broken = FakeFleet(2), Broken()
    fleet.on_launched[1] = lambda: (fleet.report("node-1", output=[OUTPUT]), fleet.fail(1))
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, max_restarts=1)
    finish = Driver(job, "run", fleet, broken, GuardedObserver(broken), time.monotonic()).run()
    assert finish.exit_code == 0
    assert len(broken.lines) == 2
