"""Signals to the driver: in each phase they end the run, with the exit code a shell expects and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cluster.conftest import Launcher, Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

WAITS = """
import os, signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if {ends}:
        time.sleep(0.2)
        sys.exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(signal.Signals[name], heard)
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("done")
"""


@pytest.fixture
def waiting(launcher: Launcher, until):
    """Starts a run whose workers are up and wait, and then end at a signal, or do not."""

    def start(*, ends: bool = True, **job) -> Run:
        script = launcher.script(WAITS.format(ends=ends))
        run = launcher.start(entrypoint={"script": script}, **job)
        until(lambda: any(run.folder.glob("runs/*/*/result.json")) or all(up(run)), 60, "all workers to be up")
        return run

    return start


def up(run: Run) -> list[str]:
    if not list(run.folder.glob("runs/*/*/events.jsonl")):
        return [""]
    return [run.log(rank) for rank in range(4)]


def events(run: Run) -> str:
    return (run.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("number", HANDLED, ids=lambda number: number.name)
def test_while_running(waiting, number):
    """Workers get the same signal, and the time to save; the exit code says which it was."""
    run = waiting(shutdown_timeout=20)
    run.process.send_signal(number)
    run.wait()
    assert run.code == 128 + number, run.err
    assert [run.log(rank) for rank in range(4)] == [f"up\n{number.name}\n"] * 4
    assert f"stopped by {number.name}" in run.err


def test_twice(waiting, until):
    """The second does not wait for workers that ignore the first."""
    run = waiting(ends=False, shutdown_timeout=60)
    run.process.send_signal(signal.SIGINT)
    until(lambda: "SIGINT received" in events(run), 10, "the first to be heard")
    run.process.send_signal(signal.SIGHUP)
    run.wait()
    assert run.code == 130, "the first signal is the one that ended it"


def test_both_at_once(waiting):
    """Neither is lost: two at the same moment are two."""
    run = waiting(ends=False, shutdown_timeout=60)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGHUP)
    run.wait()
    assert run.code in (129, 130), "whichever was heard first"


def test_killed_after_the_grace(waiting):
    """Workers that ignore the signal are killed when the grace is over."""
    run = waiting(ends=False, shutdown_timeout=1)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.code == 143
    assert [f["exit_code"] for a in run.result["attempts"] for f in a["failures"]] == [-9] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_while_placing(launcher, until, number):
    """Nothing runs yet, and nothing stays behind of what was asked for."""
    run = launcher.start(entrypoint={"script": launcher.script("print('never')")}, nproc_per_node=64)
    until(lambda: list(run.folder.glob("runs/*/*/events.jsonl")) and events(run).count("\n") > 1, 60, "the wait")
    run.process.send_signal(number)
    run.wait()
    assert run.code == 128 + number, run.err


def test_while_agents_warm_up(launcher, until):
    """The fork servers are importing, for long: they are ended in the middle of it."""
    (launcher.folder / "slow_to_import.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(60)")
    script = launcher.script("print('never')")
    where = f"env.PYTHONPATH={launcher.folder}"
    run = launcher.start(where, entrypoint={"script": script}, preload=["slow_to_import"])
    until((launcher.folder / "importing").exists, 60, "a fork server that imports")
    run.process.send_signal(signal.SIGQUIT)
    run.wait()
    assert run.code == 131, run.err


def test_while_connecting(launcher):
    """Before there is a run: one line, the same exit codes."""
    script = launcher.script("print('never')")
    code = f"""
import os, signal, sys, threading
from raylaunch.cluster import session
found = session.find
def find(options):
    os.kill(os.getpid(), signal.SIGHUP)
    return found(options)
session.find = find
from raylaunch.cli.main import main
sys.exit(main(["--nproc-per-node", "1", {script!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=launcher.folder,
        env=launcher.cluster.env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert done.returncode == 129, done.stderr
    assert "stopped by SIGHUP before anything was started" in done.stderr


def test_what_was_ignored_stays_ignored(waiting):
    """`nohup raylaunch ...`: the terminal that goes away does not end the run, as it does under torchrun."""
    run = waiting(ignored=(signal.SIGHUP,))
    run.process.send_signal(signal.SIGHUP)
    (run.folder / "go").touch()
    run.wait()
    assert run.code == 0, run.err
    assert run.log(0) == "up\ndone\n"


def test_only_the_signals_that_were_asked_for_are_handled(waiting):
    """`signals_to_handle` with SIGUSR1 in it: the run ends by it, as under torchrun."""
    run = waiting(signals_to_handle=["SIGUSR1"])
    run.process.send_signal(signal.SIGUSR1)
    run.wait()
    assert run.code == 128 + signal.SIGUSR1, run.err
    assert run.log(3) == "up\nSIGUSR1\n"


def test_forwarded_signals_do_not_end_the_run(waiting, until):
    """Every worker gets them, as often as they come, and the run goes on to its end."""
    run = waiting(ends=False, signals_to_forward=["SIGUSR1"])
    for count in (1, 2):
        run.process.send_signal(signal.SIGUSR1)
        until(lambda count=count: all(log.count("SIGUSR1") == count for log in up(run)), 20, "all workers to hear it")
    (run.folder / "go").touch()
    run.wait()
    assert run.code == 0, run.err
    assert [run.log(rank) for rank in range(4)] == ["up\nSIGUSR1\nSIGUSR1\ndone\n"] * 4
