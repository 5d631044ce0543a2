"""Signals to the driver: in each phase they end the run, with the exit code a shell expects and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cluster.conftest import Launcher, Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WAITS = """
import os, signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if signal.Signals(number).name in {ends}:
        time.sleep(0.2)
        sys.exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(signal.Signals[name], heard)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def waiting(launcher: Launcher, until):
    """Starts a run whose workers are up and wait, and then end at these signals."""

    def start(*ends: str, **job) -> Run:
        script = launcher.script(WAITS.format(ends=ends))
        run = launcher.start(entrypoint={"script": script}, **job)
        until(lambda: any(run.folder.glob("runs/*/*/result.json")) or all(up(run)), 100, "all workers to be up")
        return run

    return start


def up(run: Run) -> list[str]:
    if not list(run.folder.glob("runs/*/*/events.jsonl")):
        return [""]
    return [run.log(rank) for rank in range(4)]


def events(run: Run) -> str:
    return (run.run_dir / "events.jsonl").read_text()


def test_while_running(waiting):
    """Workers get the same signal, and the time to save; the exit code says which it was."""
    run = waiting("SIGINT", shutdown_timeout=100)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.code == 130, run.err
    assert [run.log(rank) for rank in range(4)] == ["up\nSIGINT\n"] * 4
    assert "stopped by SIGINT" in run.err


def test_both_at_once(waiting):
    """Neither is lost: two at the same moment are two, and the second does not wait for workers that ignore the first."""
    run = waiting(shutdown_timeout=1000)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGHUP)
    run.wait()
    assert run.code in (129, 130), "whichever was heard first"


def test_killed_after_the_grace(waiting):
    """Workers that ignore the signal are killed when the grace is over."""
    run = waiting(shutdown_timeout=1)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.code == 143
    assert [f["exit_code"] for a in run.result["attempts"] for f in a["failures"]] == [-9] * 4


def test_while_placing(launcher, until):
    """Nothing runs yet, and nothing stays behind of what was asked for."""
    run = launcher.start(entrypoint={"script": launcher.script("print('never')")}, nproc_per_node=64)
    until(lambda: list(run.folder.glob("runs/*/*/events.jsonl")) and events(run).count("\n") > 1, 100, "the wait")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.code == 143, run.err


def test_while_agents_warm_up(launcher, until):
    """The fork servers are importing, for long: they are ended in the middle of it."""
    (launcher.folder / "slow_to_import.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(60)")
    script = launcher.script("print('never')")
    where = f"env.PYTHONPATH={launcher.folder}"
    run = launcher.start(where, entrypoint={"script": script}, preload=["slow_to_import"])
    until((launcher.folder / "importing").exists, 100, "a fork server that imports")
    run.process.send_signal(signal.SIGQUIT)
    run.wait()
    assert run.code == 131, run.err


def test_while_connecting(launcher):
    """Before there is a run: one line, the same exit codes."""
    script = launcher.script("print('never')")
    code = f"""
import os, signal, sys, threading
from raylaunch.cluster import where
found = where.find
def find(options):
    os.kill(os.getpid(), signal.SIGHUP)
    return found(options)
where.find = find
from raylaunch.cli.main import main
sys.exit(main(["--nproc-per-node", "1", {script!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=launcher.folder,
        env=launcher.cluster.env(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert done.returncode == 129, done.stderr
    assert "stopped by SIGHUP before anything was started" in done.stderr


def test_each_signal_is_what_the_job_makes_of_it(waiting, until):
    """What was ignored stays ignored, as with `nohup` under torchrun; what is forwarded reaches every worker, as often
    as it comes, and the run goes on; one of `signals_to_handle` ends it, whichever it is."""
    run = waiting(
        "SIGUSR2",
        ignored=(signal.SIGHUP,),
        signals_to_handle=["SIGHUP", "SIGUSR2"],
        signals_to_forward=["SIGUSR1"],
    )
    run.process.send_signal(signal.SIGHUP)
    for count in (1, 2):
        run.process.send_signal(signal.SIGUSR1)
        until(lambda count=count: all(log.count("SIGUSR1") == count for log in up(run)), 100, "all workers to hear it")
    run.process.send_signal(signal.SIGUSR2)
    run.wait()
    assert run.code == 128 + signal.SIGUSR2, run.err
    assert [run.log(rank) for rank in range(4)] == ["up\nSIGUSR1\nSIGUSR1\nSIGUSR2\n"] * 4
