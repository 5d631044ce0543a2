"""`raylaunch stop`, of runs that tests pretend to drive, and of a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from raylaunch.cli import main
from raylaunch.cluster.driver.run_registry import DriverProcess
from raylaunch.errors import ExitCode
from raylaunch.node.linux import procfs
from tests.cli.runs.made_runs import NOBODY, dead, make_folder

PROGRAM = "from raylaunch.cli.main import main; exit(main())"
SCRIPT = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nprint('up', flush=True)\nsignal.pause()\n"


@pytest.fixture
def sleeper():
    """A process that stands for a driver."""
    process = subprocess.Popen(["sleep", "60"])
    known = asdict(DriverProcess.this())
    yield process, DriverProcess(**known | {"pid": process.pid, "started": procfs.start_ticks(process.pid)})
    process.kill()
    process.wait()


def test_a_driver_gets_the_signal(registry, tmp_path, capfd, sleeper):
    """SIGTERM, or the first that ends the run; what came of it is told."""
    process, driver = sleeper
    registry.add(make_folder(tmp_path / "a" / "b", lines=6), driver=driver, signals=("SIGINT", "SIGTERM"))
    assert main.main(["stop", "-y"]) == ExitCode.OK
    assert process.wait(20) == -signal.SIGTERM
    assert capfd.readouterr().err == (
        f"raylaunch: SIGTERM was sent to the driver of a b (process {process.pid})\n"
        "raylaunch: a b: lost; its driver is gone, and has written no result\n"
    )
    assert main.main(["stop", "-y"]) == ExitCode.OK
    assert "a b has ended already: lost" in capfd.readouterr().err


def test_the_second_signal_of_now_is_sent_when_the_first_was_noticed(registry, tmp_path, monkeypatch, sleeper):
    """The kernel would merge two that come at once."""
    process, driver = sleeper
    folder = make_folder(tmp_path / "a" / "b", "interrupted-twice", lines=6)
    registry.add(folder, driver=driver)
    sent: list[int] = []
    monkeypatch.setattr("signal.pidfd_send_signal", lambda _, number: sent.append(number))
    counts: list[int] = []

    def sleep(_: float) -> None:
        counts.append(len(sent))
        if len(counts) == 2:
            folder.joinpath("result.json").write_text(json.dumps({"exit_code": 143, "why": "stopped"}))
        if len(counts) == 4:
            process.kill()
            process.wait()

    monkeypatch.setattr("time.sleep", sleep)
    assert main.main(["stop", "--now"]) == ExitCode.OK
    assert (sent, counts) == ([signal.SIGTERM, signal.SIGTERM], [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"driver": NOBODY}, "it runs on host-1"),
        ({"signals": ()}, "ends at no signal"),
        ({"driver": dead()}, "has ended already"),
    ],
)
def test_a_run_that_cannot_be_stopped(registry, tmp_path, capfd, facts, said):
    """It is said why."""
    registry.add(make_folder(tmp_path / "a" / "b", lines=6), **facts)
    assert main.main(["stop", "-y"]) == (ExitCode.OK if "already" in said else ExitCode.USAGE)
    assert said in capfd.readouterr().err


def test_a_person_is_asked(registry, tmp_path, capfd, monkeypatch, sleeper):
    """On a terminal, unless `-y` is given. Ctrl-C ends the waiting."""
    _, driver = sleeper
    registry.add(make_folder(tmp_path / "a" / "b", lines=6), driver=driver)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    assert main.main(["stop"]) == ExitCode.INTERRUPTED
    assert capfd.readouterr().err == "stop a b (4 workers on 2 nodes)? [y/N] raylaunch: nothing was stopped\n"

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin.readline", lambda: "y\n")
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr("time.sleep", interrupt)
    assert main.main(["stop"]) == ExitCode.INTERRUPTED
    assert "a b is still ending" in capfd.readouterr().err


def test_a_real_run_is_listed_followed_and_stopped(tmp_path):
    """From other processes, while it lasts and afterwards, without torch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **streams)

    run = start("--standalone", "--set", "preload=[]", "--set", "run_id=one", "train.py")
    assert run.stdout.readline() == "up\n"
    followed = start("logs", "-f", "one")
    assert followed.stdout.readline() == "up\n"
    shown = json.loads(start("ps", "--json").communicate(timeout=60)[0])["runs"]
    assert [(each["name"], each["id"], each["state"], each["pid"]) for each in shown] == [
        ("train", "one", "running", run.pid)
    ]
    stopped = start("stop")
    said = stopped.communicate(timeout=60)[1]
    assert (stopped.returncode, said.splitlines()[-1].rpartition(" by ")[0]) == (
        *(0, "raylaunch: train one: done with exit code 143: stopped"),
    )
    assert run.wait(60) == 143
    followed.communicate(timeout=60)
    run.communicate(timeout=60)
    assert followed.returncode == 143
