"""`raylaunch -d` without a cluster: a background process of this machine, which is watched and stopped by commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from raylaunch.cli.detached import detach
from raylaunch.cli.main import main
from tests.cluster.conftest import wait_until
from tests.cluster.test_without_cluster import NO_RAYLETS
from tests.private_cluster import MARK, end_marked, marked

MAIN = f"{NO_RAYLETS}; from raylaunch.cli.main import main; sys.exit(main())"
INTERRUPTED = f"""{NO_RAYLETS}
import os, signal
from raylaunch.cli.detached import background_run
from raylaunch.cli.main import main
popen = background_run.subprocess.Popen
def start(*args, **kwargs):
    process = popen(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGINT)
    return process
background_run.subprocess.Popen = start
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
SCRIPT = """
import os, time
print("rank", os.environ["RANK"], "in", os.environ["KEPT"], flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
print("last words", flush=True)
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def said(tmp_path):
    """Return a function that runs a command in a folder of its own, and returns its exit code, stdout and stderr.

    `interrupt_after`: it gets SIGINT when it has printed so many lines. `program`: of the command, in Python.
    """
    mark = "detached" + os.urandom(8).hex()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {MARK: mark, "XDG_STATE_HOME": str(tmp_path / "state"), "KEPT": "this environment"}
    job = {"entrypoint": {"script": "train.py"}, "nproc_per_node": 2, "preload": [], "ray": {"address": "none"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments: str, interrupt_after: int = 0, program: str = MAIN) -> tuple[int, str, str]:
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                cwd=tmp_path,
                env=env,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        if interrupt_after:
            wait_until(lambda: out.read_text().count("\n") >= interrupt_after, 100, "lines of workers")
            wait_until(lambda: "running" in err.read_text(), 100, "the state of the run")
            process.send_signal(signal.SIGINT)
        return process.wait(200), out.read_text(), err.read_text()

    yield run
    try:
        wait_until(lambda: not marked(mark), 100, "the run to leave nothing")
    finally:
        end_marked(mark)


def test_a_run_goes_on_after_its_command(said, tmp_path):
    """It is there when the command returns; Ctrl-C detaches; at its end `attach` has its exit code and last words."""
    code, out, err = said("-d", "job.yaml")
    assert code == 0, err
    assert "attempt 1 runs: 2 workers on 1 node" in err
    run_id, _, *commands = out.splitlines()
    assert commands == [f"raylaunch {command} train/{run_id}" for command in ("attach", "logs -f", "stop")]
    code, out, err = said("attach", run_id, "--since", "1h", "--rank", "0-1", interrupt_after=2)
    assert (code, sorted(out.splitlines())) == (130, [f"[{rank}] rank {rank} in this environment" for rank in (0, 1)])
    assert f"detached; train {run_id} goes on" in err
    assert re.search(rf"train +{run_id} +running", said("ps")[1])
    (tmp_path / "end").touch()
    code, out, err = said("attach")
    assert code == 0
    assert "succeeded: all 2 workers finished" in err
    log = tmp_path / "runs" / "train" / run_id / "driver.log"
    assert "attempt 1 runs" in log.read_text()
    wait_until(lambda: "all 2 workers finished" in log.read_text(), 100, "the driver's last words")


def test_a_run_is_stopped(said):
    """`stop` ends it, and `attach` afterwards has the exit code of a run that was stopped."""
    code, out, err = said("-d", "--no-wait", "job.yaml", "detach=true")
    assert code == 0, err
    (run_id, *_) = out.splitlines()
    wait_until(lambda: "running" in said("status", run_id)[1], 100, "the workers")
    assert said("stop", "--yes", "--now", run_id)[0] == 0
    assert said("attach", run_id)[0] == 128 + signal.SIGTERM


def test_ctrl_c_while_it_starts(said):
    """A signal that comes when the driver is there, but has not told the run's id, stops the run."""
    code, out, err = said("-d", "job.yaml", program=INTERRUPTED)
    assert (code, out) == (130, ""), err
    assert "stopped by SIGINT while it started" in err
    assert " stopped " in said("ps", "-a")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("job.yaml", "--no-wait"), "`--no-wait` goes with `-d`"),
        (("-d", "job.yaml", "pty=true"), "`detach` and `pty` exclude each other"),
    ],
)
def test_what_makes_no_sense_starts_nothing(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(detach, "_news", lambda *_: pytest.fail("it was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({"entrypoint": {"command": "true"}, "ray": {"address": "none"}}))
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, text in err) == ("", True)


def test_what_cannot_start_says_so(said):
    """With the exit code that it has without `-d`."""
    code, out, err = said("-d", "job.yaml", "nproc_per_node=gpu")
    assert (code, out) == (3, "")
    assert "error:" in err
