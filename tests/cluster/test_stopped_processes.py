"""Processes are stopped by SIGSTOP, one or all: no worker of a lost node trains on, and the run continues."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Run, wait_until
from tests.cluster.test_no_orphans import agents, cmdline, parent, workers
from tests.private_cluster import MARK, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TIMEOUT = 6.0
"""Seconds: `node_timeout`."""
SHORT = 3.0
"""The same, where a test does not look at what happens meanwhile."""

TRAINING = """
import os, time
print("up", flush=True)
with open(os.environ["STEPS"] + "/" + os.environ["RANK"], "a") as steps:
    while True:
        print(time.monotonic(), file=steps, flush=True)
        time.sleep(0.01)
"""


def start_training(launcher, tmp_path, **job):
    """Start a run, and wait until all workers of its first attempt are up."""
    (tmp_path / "steps").mkdir()
    run = launcher.start(
        entrypoint={"script": launcher.script(TRAINING)},
        env={"STEPS": str(tmp_path / "steps")},
        **{"max_restarts": 1, "node_timeout": TIMEOUT} | job,
    )
    wait_for_attempt(run, 1)
    return run


def wait_for_attempt(run, attempt):
    logs = [f"runs/*/*/attempt-{attempt}/rank-{rank}/stdout.log" for rank in range(4)]
    wait_until(
        lambda: all(any(path.read_text() for path in run.folder.glob(pattern)) for pattern in logs),
        100,
        f"attempt {attempt} to be up",
    )


def last_steps(tmp_path: Path) -> dict[str, float]:
    return {path.name: float(path.read_text().splitlines()[-2]) for path in (tmp_path / "steps").iterdir()}


def events_of(run, kind: str):
    lines = (run.run_dir / "events.jsonl").read_text().splitlines(keepends=True)[2:]
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["event"] for row in rows if row["event"]["is"] == kind]


def interrupt(run):
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.code == 130


def test_a_stopped_driver_restarts_the_attempt(launcher, tmp_path):
    """Its nodes end their workers before it could take them for lost. When it is continued, it starts the next attempt,
    and no restart is used up.
    """
    run = start_training(launcher, tmp_path)
    before = set(workers(run))
    assert len(before) == 4
    os.kill(run.process.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_until(lambda: not before & set(workers(run)), 100, "the workers to end")
        wait_until(lambda: time.monotonic() > stopped + 2 * TIMEOUT, 100, "the driver to have been stopped for long")
        assert max(last_steps(tmp_path).values()) <= stopped + TIMEOUT
        wait_until(lambda: agents(launcher.cluster) == [], 100, "the agents to end")
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    wait_for_attempt(run, 2)
    assert {event["node"] for event in events_of(run, "NodeLost")} == {"node-1", "node-2"}
    interrupt(run)
    assert "restart 1 of" not in (run.run_dir / "events.jsonl").read_text()


def test_a_stopped_agent_is_lost(launcher, tmp_path):
    """Its workers end before the driver takes it for lost; another agent is started, and no restart is used up."""
    run = start_training(launcher, tmp_path)
    agent = agents(launcher.cluster)[0]
    its = {pid for pid in workers(run) if agent in ancestors(pid)}
    assert len(its) == 2
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_until(lambda: events_of(run, "NodeLost"), 100, "the driver to notice")
        assert not its & set(workers(run))
        (event,) = events_of(run, "NodeLost")
        assert event["why"] == "nothing was heard of it for 6 s"
        wait_for_attempt(run, 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)
    interrupt(run)
    assert "restart 1 of" not in (run.run_dir / "events.jsonl").read_text()


def ancestors(pid: int) -> list[int]:
    found = []
    while (pid := parent(pid)) > 1:
        found.append(pid)
    return found


@pytest.fixture
def detached(launcher, tmp_path):
    """Start a run in the background, and wait until all workers of its first attempt are up."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def start(**job):
        (tmp_path / "steps").mkdir()
        mark = os.urandom(8).hex()
        job = {"nnodes": 2, "nproc_per_node": 2, "placement": "pack", "preload": [], "max_restarts": 1} | job
        job |= {
            "entrypoint": {"script": launcher.script(TRAINING)},
            "env": {"STEPS": str(tmp_path / "steps"), MARK: mark},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        command = launcher.command("raylaunch", "-d", "job.yaml", env=env)
        run = Run(command, tmp_path, mark).wait()
        assert run.code == 0, run.err
        launcher.runs.append(run)
        wait_for_attempt(run, 1)
        return run

    yield start
    launcher.python("raylaunch", "stop", "-y", "--now", env=env)


@pytest.mark.parametrize("which", ["everything", "everything of Ray"])
def test_a_run_after_a_pause(launcher, detached, tmp_path, which):
    """A virtual machine that is paused, a laptop that sleeps: the run trains again by itself, without a restart spent."""
    run = detached(node_timeout=SHORT)
    stopped = {*marked(run.mark), *marked(launcher.cluster.mark)}
    if which == "everything of Ray":
        stopped = {pid for pid in stopped if any(word in cmdline(pid) for word in ("raylet", "gcs_server"))}
    assert stopped
    pause(stopped)
    resumed = time.monotonic()
    wait_until(lambda: min(last_steps(tmp_path).values()) > resumed + 1, 100, "all ranks to train again")
    if which != "everything of Ray":
        wait_for_attempt(run, 2)
    assert "restart 1 of" not in (run.run_dir / "events.jsonl").read_text()


def pause(pids) -> None:
    """Stop processes until all leases have expired by far, and continue them."""
    send(pids, signal.SIGSTOP)
    until = time.monotonic() + 2 * SHORT
    wait_until(lambda: time.monotonic() > until, 100, "the leases to expire")
    send(pids, signal.SIGCONT)


def send(pids, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
