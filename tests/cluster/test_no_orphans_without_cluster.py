"""No orphans without Ray, by every way to run: nothing of a run is left in memory or on disk after its driver.

What is killed on Ray is in `test_no_orphans.py`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import secrets
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, end_marked, marked

pytestmark = pytest.mark.timeout(200)

PROGRAM = """
import subprocess, sys, threading, time
from pathlib import Path
import raylaunch
from raylaunch.cli.main import main

def work(*_):
    import subprocess, time
    from pathlib import Path
    subprocess.Popen(["sleep", "1200"], start_new_session=True)
    Path("up").touch()
    time.sleep(1200)

how = {"log_dir": "/dev/null", "ray": {"address": "none"}, "preload": [], "show": "none"}
match sys.argv[1]:
    case "command":
        Path("train.py").write_text("import subprocess, time\\nfrom pathlib import Path\\n"
            "subprocess.Popen(['sleep', '1200'], start_new_session=True)\\nPath('up').touch()\\ntime.sleep(1200)\\n")
        sys.exit(main(["--standalone", "--log-dir=/dev/null", "--set", "preload=[]", "train.py"]))
    case "function":
        raylaunch.launch(work, backend="none", **how)
    case "spawn":
        raylaunch.spawn(work, nprocs=2, **how)
    case "thread":
        thread = threading.Thread(target=raylaunch.launch, args=(work,), kwargs=how | {"backend": "none"}, daemon=True)
        thread.start()
        thread.join()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the program in one of its ways, wait until it is up, and check afterwards that nothing is left."""
    mark = secrets.token_hex(8)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {MARK: mark, "TMPDIR": str(tmp_path / "tmp")}
    found: list[subprocess.Popen[bytes]] = []

    def run(way: str, terminal: int | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "program.py", way],
            cwd=tmp_path,
            env=env,
            stdin=terminal,
            stdout=subprocess.DEVNULL if terminal is None else terminal,
            stderr=subprocess.DEVNULL if terminal is None else terminal,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        found.append(process)
        wait_until(lambda: (tmp_path / "up").exists() or process.poll() is not None, 100, "the run to be up")
        assert process.poll() is None
        assert len(marked(mark)) >= 3
        return process

    try:
        yield run
        for process in found:
            process.wait(100)
        wait_until(lambda: not marked(mark), 100, "all processes to be gone")
        assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        end_marked(mark)


def children(pid: int) -> list[int]:
    """Return the driver's children, which are subreapers."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    return [found for child in children(pid) for found in (child, *below(child))]


@pytest.mark.parametrize("way", ["command", "function", "thread"])
def test_the_driver_is_killed(start, way):
    """Its workers and their children end too."""
    start(way).kill()


def test_the_driver_and_the_subreapers_are_killed(start):
    """The fork server ends the rest."""
    process = start("command")
    for pid in (*children(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)


def test_the_driver_is_killed_while_all_else_is_stopped(start):
    """The kernel wakes the subreaper, which wakes the rest."""
    process = start("command")
    for pid in below(process.pid):
        os.kill(pid, signal.SIGSTOP)
    process.kill()


@pytest.mark.parametrize(("way", "code"), [("command", 129), ("spawn", 1)])
def test_the_terminal_is_closed(start, way, code):
    """The run ends in good order, as by SIGHUP."""
    ours, its = pty.openpty()
    process = start(way, terminal=its)
    os.close(its)
    os.close(ours)
    assert process.wait(100) == code
