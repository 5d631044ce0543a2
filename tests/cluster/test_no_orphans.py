"""kill -9 of an agent and of the driver: workers, data loaders and other grandchildren go with it.

Of workers, fork servers and subreapers it is shown in tests/node, of a raylet in tests/hosts.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import kill, wait_until
from tests.private_cluster import marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WITH_CHILDREN = """
import os, subprocess, time
subprocess.Popen(["sleep", "1200"])
subprocess.Popen(["sleep", "1210"], start_new_session=True)
if os.fork() == 0:
    time.sleep(1200)
print("up", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
time.sleep(1200)
"""


def started(launcher, *, attempt=1, **job):
    script = launcher.script(WITH_CHILDREN)
    run = launcher.start(entrypoint={"script": script}, max_restarts=3, **job)
    wait_for_attempt(run, attempt)
    return run


def wait_for_attempt(run, attempt):
    logs = [f"runs/*/*/attempt-{attempt}/rank-{rank}/stdout.log" for rank in range(4)]
    wait_until(
        lambda: all(any(path.read_text() for path in run.folder.glob(pattern)) for pattern in logs),
        100,
        f"attempt {attempt} to be up",
    )


def test_agent(launcher):
    """A dead agent is a lost node: its workers end, another agent takes its place, and no restart is spent."""
    run = started(launcher)
    before = set(run.processes("sleep 12"))
    kill(agents(launcher.cluster)[0])
    wait_for_attempt(run, 2)
    assert not before & set(marked(run.mark))
    events = (run.run_dir / "events.jsonl").read_text()
    assert "NodeLost" in events
    assert "restart 1 of" not in events
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_driver(launcher):
    """All processes end with the driver."""
    run = started(launcher)
    run.process.kill()
    run.wait()
    wait_until(lambda: not marked(run.mark), 100, "everything to end")


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def fork_servers(run) -> list[int]:
    """Return the process ids of the fork servers, the parents of the workers."""
    return run.processes("raylaunch: fork server")


def workers(run) -> list[int]:
    """Return the process ids of the workers, without those of their children."""
    servers = fork_servers(run)
    return [pid for pid in run.processes(" rank ") if parent(pid) in servers]


def agents(cluster) -> list[int]:
    return [pid for pid in marked(cluster.mark) if "raylaunch: agent" in cmdline(pid)]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
