"""Signals to the driver: in each phase they end the run with the expected exit code, and leave no process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from raylaunch.cluster.driver import signals
from raylaunch.core.job.job import Job
from tests.cluster.conftest import Launcher, Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WAITS_FOR_SIGNALS = """
import os, signal, sys, time
def handle(number, frame):
    print(signal.Signals(number).name, flush=True)
    if signal.Signals(number).name in {ends}:
        time.sleep(0.2)
        sys.exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(signal.Signals[name], handle)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def start_waiting(launcher: Launcher, until):
    """Start a run whose workers wait and end at these signals only."""

    def start(*ends: str, **job) -> Run:
        script = launcher.script(WAITS_FOR_SIGNALS.format(ends=ends))
        run = launcher.start(entrypoint={"script": script}, **job)
        until(
            lambda: any(run.folder.glob("runs/*/*/result.json")) or all(worker_logs(run)), 100, "all workers to be up"
        )
        return run

    return start


def worker_logs(run: Run) -> list[str]:
    if not list(run.folder.glob("runs/*/*/events.jsonl")):
        return [""]
    return [run.log(rank) for rank in range(4)]


def events(run: Run) -> str:
    return (run.run_dir / "events.jsonl").read_text()


def test_a_signal_while_workers_run(start_waiting):
    """They get the same signal and time to save; the exit code says which signal it was."""
    run = start_waiting("SIGINT", shutdown_timeout=100)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.code == 130, run.err
    assert [run.log(rank) for rank in range(4)] == ["up\nSIGINT\n"] * 4
    assert "stopped by SIGINT" in run.err


def test_two_signals_at_once(start_waiting):
    """Neither is lost, and the second ends workers that ignore the first."""
    run = start_waiting(shutdown_timeout=1000, nnodes=1, nproc_per_node=4)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGHUP)
    run.wait()
    assert run.code in (129, 130), "of the signal that was handled first"


def test_workers_that_ignore_the_signal_are_killed(start_waiting):
    """When the grace period is over."""
    run = start_waiting(shutdown_timeout=1, nnodes=1, nproc_per_node=4)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.code == 143
    assert [f["exit_code"] for a in run.result["attempts"] for f in a["failures"]] == [-9] * 4


def test_a_signal_while_resources_are_requested(launcher, until):
    """No worker runs yet, and all requests are withdrawn."""
    run = launcher.start(entrypoint={"script": launcher.script("print('never')")}, nproc_per_node=64)
    until(lambda: list(run.folder.glob("runs/*/*/events.jsonl")) and events(run).count("\n") > 1, 100, "the wait")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.code == 143, run.err


def test_a_signal_while_agents_import(launcher, until):
    """The fork servers are still importing, and are killed."""
    (launcher.folder / "slow_to_import.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(60)")
    script = launcher.script("print('never')")
    where = f"env.PYTHONPATH={launcher.folder}"
    run = launcher.start(where, entrypoint={"script": script}, preload=["slow_to_import"])
    until((launcher.folder / "importing").exists, 100, "a fork server that imports")
    run.process.send_signal(signal.SIGQUIT)
    run.wait()
    assert run.code == 131, run.err


@pytest.mark.parametrize(
    ("number", "when", "grace", "code"),
    [
        (signal.SIGHUP, "before", 0, 129),
        (signal.SIGTERM, "before", 0, 143),
        (signal.SIGTERM, "after", 0, 143),  # then the handler is Ray's
        (signal.SIGTERM, "after", 9, 75),
    ],
)
def test_a_signal_while_connecting(launcher, number, when, grace, code):
    """Before the run begins: an error of one line. With a grace nothing is lost, and a new run goes on."""
    script = launcher.script("print('never')")
    program = f"""
import os, ray, sys
from raylaunch.cli.main import main
init = ray.init
def initialize(*args, **kwargs):
    if {when!r} == "before":
        os.kill(os.getpid(), {number:d})
    made = init(*args, **kwargs)
    os.kill(os.getpid(), {number:d})
    return made
ray.init = initialize
sys.exit(main(["--nproc-per-node", "1", "--grace", "{grace}", {script!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=launcher.folder,
        env=launcher.cluster.env(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert done.returncode == code, done.stderr
    assert f"stopped by {number.name} before anything was started" in done.stderr


def test_ignored_forwarded_and_handled_signals(start_waiting, until):
    """An ignored signal stays ignored, as with `nohup` under torchrun. A forwarded one reaches every worker each time it comes,
    and the run continues. One of `signals_to_handle` ends the run.
    """
    run = start_waiting(
        "SIGUSR2",
        ignored=(signal.SIGHUP,),
        signals_to_handle=["SIGHUP", "SIGUSR2"],
        signals_to_forward=["SIGUSR1"],
    )
    run.process.send_signal(signal.SIGHUP)
    for count in (1, 2):
        run.process.send_signal(signal.SIGUSR1)
        until(
            lambda count=count: all(log.count("SIGUSR1") == count for log in worker_logs(run)),
            100,
            "all workers to get it",
        )
    run.process.send_signal(signal.SIGUSR2)
    run.wait()
    assert run.code == 128 + signal.SIGUSR2, run.err
    assert [run.log(rank) for rank in range(4)] == ["up\nSIGUSR1\nSIGUSR1\nSIGUSR2\n"] * 4


STUCK = """
import os, signal, sys, time
from raylaunch.cluster.driver import signals
from raylaunch.core.job.job import Job
from raylaunch.errors import InterruptedByUserError

signals.LEAVE_SECONDS = {leave}
told = []
kill = signal.pthread_kill

def interrupt(*told):
    signals.LEAVE_SECONDS = {leave_interrupted}
    kill(*told)

signal.pthread_kill = interrupt
try:
    with signals.handled(Job(signals_to_forward=["SIGUSR1"])) as handler:
        handler.go_to(told.append)
        {over}
        signal.pthread_sigmask({mask}, [signal.SIGTERM])  # as in a system call that no signal interrupts
        for name in {sent}:
            sent = len(told)
            os.kill(os.getpid(), signal.Signals[name])
            while len(told) == sent:
                time.sleep(0.001)
        time.sleep({stays})
except InterruptedByUserError as error:
    print(error.message)
    sys.exit(error.exit_code)
print(*told)
"""


def stuck(
    *sent: str,
    over: bool = False,
    blocked: bool = True,
    stays: float = 100.0,
    leave: float = 0.1,
    leave_interrupted: float = 0.1,
) -> tuple[int, str]:
    """Return the exit code and the output of a process that stays so many seconds after it was sent these signals.

    `leave`: how long it may take to leave before it is interrupted. `leave_interrupted`: and then before it is ended.
    """
    text = STUCK.format(
        over="handler.run_is_over()" if over else "",
        mask="signal.SIG_BLOCK" if blocked else "signal.SIG_UNBLOCK",
        sent=sent,
        stays=stays,
        leave=leave,
        leave_interrupted=leave_interrupted,
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.strip()


def test_a_process_that_is_stuck_is_ended_by_the_third_signal():
    """Two are left to the state machine; signals to forward do not count."""
    assert stuck("SIGTERM", "SIGUSR1", "SIGTERM", "SIGUSR1", stays=0.3) == (0, "SIGTERM SIGUSR1 SIGTERM SIGUSR1")
    assert stuck("SIGTERM", "SIGTERM", "SIGTERM") == (143, "")


def test_a_process_that_is_stuck_after_the_run_is_ended_by_one_signal():
    """The main thread is interrupted, and if it does not hear that either, the process ends."""
    assert stuck("SIGTERM", over=True) == (143, "")
    assert stuck("SIGTERM", over=True, blocked=False, leave_interrupted=100.0) == (
        143,
        "stopped by SIGTERM while the run ended",
    )


def test_a_process_that_ends_by_itself_is_not_interrupted():
    """A signal while the run is cleaned up does not cost the report."""
    assert stuck("SIGTERM", over=True, stays=0.01, leave=60.0) == (0, "SIGTERM")


EARLY = """
import os, signal, time
from raylaunch.cluster.driver import signals
from raylaunch.core.job.job import Job

told = []
with signals.handled(Job(signals_to_forward=["SIGUSR1"])) as handler:
    os.kill(os.getpid(), signal.SIGUSR1)
    handler.go_to(told.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    while len(told) < 2:
        time.sleep(0.001)
    time.sleep(0.1)
print(*told)
"""


def test_a_signal_to_forward_that_comes_early_is_not_lost():
    """The command gets it before its driver takes signals."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("SIGUSR1 SIGUSR1\n", "")


BETWEEN = """
import os, signal, time
from raylaunch.cluster.driver import signals
from raylaunch.core.job.job import Job

class Listener(signals._SignalListener):
    def __init__(self, *args):
        os.kill(os.getpid(), signal.SIGHUP)
        super().__init__(*args)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    def start(self):
        super().start()
        time.sleep(0.01)

signals._SignalListener = Listener
told = []
with signals.handled(Job(signals_to_handle=["SIGTERM", "SIGHUP"])) as handler:
    handler.go_to(told.append)
    while len(told) < 2:
        time.sleep(0.001)
    time.sleep(0.1)
print(*sorted(told))
"""


def test_a_signal_that_comes_while_the_listener_is_made_is_told():
    """Else the command would end by it."""
    done = subprocess.run([sys.executable, "-c", BETWEEN], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("SIGHUP SIGTERM\n", "")


def test_no_thread_can_be_started(monkeypatch):
    """The error says so, by which a person is told to allow more, and not what follows from it."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"), signals.handled(Job()) as handler:
        handler.go_to(print)
