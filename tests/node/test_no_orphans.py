"""Kill -9 of anything leaves no process alive: workers, their children, and those that fled into other sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raylaunch.core.events import WorkersExited, WorkersStopped
from raylaunch.node.messages import Ready, StoreOpen
from tests.node.harness import (
    Ears,
    Node,
    basic_env,
    children_of,
    is_listening,
    marked,
    none_left,
    send,
    until,
    wait_gone,
)

pytestmark = pytest.mark.timeout(300)

FAMILY = """
    import multiprocessing, os, subprocess, time

    def wait():
        say(os.getpid())
        time.sleep(3600)

    say(os.getpid())
    say(subprocess.Popen(["sleep", "3600"]).pid)
    say(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
    # one whose parent is gone already, in a session of its own, with a child in yet another
    say(subprocess.check_output(["sh", "-c", "setsid sh -c 'setsid sleep 3600 & sleep 3600' >/dev/null 2>&1 & echo $!"], text=True).strip())
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=wait).start()
    time.sleep(3600)
"""
SIZE = 6
"""How many processes the script tells of."""


def family(node: Node, ears: Ears, nproc: int = 1) -> list[int]:
    """Start workers with all kinds of descendants; the process ids of all."""
    node.launch(node.script(FAMILY), nproc=nproc)
    return [int(line) for line in ears.hear(SIZE * nproc)]


def all_gone(pids: list[int], mark: str) -> None:
    for pid in pids:
        wait_gone(pid)
    none_left(mark)


def test_kill_of_a_worker(node: Node, ears: Ears, mark: str) -> None:
    """Its descendants are gone when the attempt is said to be stopped."""
    pids = family(node, ears)
    send(pids[0])
    (failure,) = node.wait(WorkersExited).failures
    assert (failure.pid, failure.signal) == (pids[0], "SIGKILL")
    node.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


def test_kill_of_a_worker_then_the_next_attempt(node: Node, ears: Ears) -> None:
    """The next attempt begins after the last descendant has gone."""
    pids = family(node, ears)
    send(pids[0])
    node.wait(WorkersExited)
    text = f"import os\nprint([pid for pid in {pids} if os.path.exists(f'/proc/{{pid}}')])"
    assert node.run(node.script(text, "next.py")).stdout() == "[]\n"


def test_kill_of_the_fork_server(own: Node, ears: Ears) -> None:
    """Its workers are told as failed, all orphans are ended, and a new fork server takes the next attempt."""
    pids = family(own, ears, nproc=2)
    old = own.supervisor.server_pid
    send(old)
    exited = own.wait(WorkersExited)
    assert sorted((failure.rank, failure.signal, failure.stopped) for failure in exited.failures) == [
        (0, "SIGKILL", False),
        (1, "SIGKILL", False),
    ]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert own.wait(Ready).pid != old
    assert own.run(own.script("print('again')", "next.py")).stdout() == "again\n"


@pytest.mark.parametrize("own", [("torch",)], indirect=True, ids=["torch"])
def test_the_next_store_outlives_the_fork_server(own: Node, ears: Ears) -> None:
    """The port that was told for the next attempt still holds after the fork server's death: workers meet there."""
    family(own, ears)
    port = own.open_store()
    assert is_listening(port)
    send(own.supervisor.server_pid)
    own.wait(WorkersExited)
    script = own.script("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(dist.get_world_size())
        dist.destroy_process_group()
    """)
    outcome = own.run(script, nproc=2, port=port)  # before the new fork server is ready
    assert outcome.stdout() == "2\n", outcome.stderr()


def test_what_was_asked_of_a_dead_fork_server_is_answered(own: Node, ears: Ears) -> None:
    """A stop that was under way ends in `WorkersStopped`, a store that was asked for is opened."""
    own.launch(
        own.script(
            "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\nwhile True: time.sleep(1)"
        )
    )
    ears.hear()
    own.supervisor.stop(own.attempt, 30.0)
    assert ears.hear() == ["term"]
    server = own.supervisor.server_pid
    send(server, signal.SIGSTOP)
    own.supervisor.open_store(own.attempt + 1)
    send(server)
    stopped = own.wait(WorkersStopped)
    assert (stopped.attempt, [failure.stopped for failure in stopped.failures]) == (own.attempt, [True])
    assert is_listening(own.wait(StoreOpen).port)


def test_kill_of_a_fork_server_that_is_not_ready(tmp_path: Path, mark: str, ears: Ears) -> None:
    """An attempt that was not yet begun is no failure: the next fork server begins it, once."""
    node = Node(env=basic_env(mark))
    node.move_to(tmp_path, mark, ears)
    node.supervisor.start()
    node.launch(node.script("print('once')"))
    assert node.supervisor._hearth._server is not None
    keeper = node.supervisor._hearth._server.pid
    (server,) = until(lambda: children_of(keeper), "no fork server came")
    send(server)
    event = node.wait(WorkersExited)
    assert event.failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == "once\n"
    node.supervisor.close()


def test_fork_server_that_never_gets_ready(tmp_path: Path, mark: str, ears: Ears) -> None:
    """After three deaths in a row before it was ready it is given up, with a word why, instead of tried for ever."""
    (tmp_path / "selectors.py").write_text("import time\ntime.sleep(60)")  # what the fork server imports for itself
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=())
    node.supervisor.start()
    killed: set[int] = set()
    heard: list[object] = []

    def fork_server() -> set[int]:
        heard.extend(node.silence(0.01))
        assert node.supervisor._hearth._server is not None
        with contextlib.suppress(FileNotFoundError):
            return children_of(node.supervisor._hearth._server.pid) - killed
        return set()

    for _ in range(3):
        (found,) = until(fork_server, "none came")
        killed.add(found)
        send(found)
    until(lambda: heard.extend(node.silence(0.01)) or heard, "it is tried for ever")
    (ready,) = heard
    assert not ready.torch
    assert "dies again and again" in ready.why[-1]
    node.supervisor.close()


def test_kill_of_the_keeper(own: Node, ears: Ears) -> None:
    """The process between us and the fork server is as mortal: everything goes, and comes anew."""
    pids = family(own, ears)
    assert own.supervisor._hearth._server is not None
    send(own.supervisor._hearth._server.pid)
    exited = own.wait(WorkersExited)
    assert [failure.rank for failure in exited.failures] == [0]
    for pid in pids:
        wait_gone(pid)
    assert own.run(own.script("print('again')", "next.py")).stdout() == "again\n"


def test_close_ends_everything(own: Node, ears: Ears, mark: str) -> None:
    """When `close` returns, no process is left."""
    pids = family(own, ears)
    own.open_store()
    own.supervisor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


PARENT = """
import os, sys
from pathlib import Path
from tests.node.harness import Ears, Node
from tests.node.test_no_orphans import FAMILY

class Deaf(Ears):
    def __init__(self, path):
        self.path = path

folder, mark, path = sys.argv[1:]
node = Node(preload=())
node.supervisor.settings.env["RAYLAUNCH_TEST_MARK"] = mark
node.move_to(Path(folder), mark, Deaf(path))
node.start()
node.open_store()
node.launch(node.script(FAMILY), nproc=2)
while True:
    node.silence(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_kill_of_the_supervisors_own_process(tmp_path: Path, mark: str, ears: Ears, number: signal.Signals) -> None:
    """However the owner of the supervisor dies, its fork server, store, workers and all their children go within seconds."""
    root = Path(__file__).parents[2]
    env = basic_env(mark) | {"PYTHONPATH": str(root)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), mark, str(ears.path)],
        env=env,
        cwd=root,
        stderr=subprocess.DEVNULL,
    )
    pids = [int(line) for line in ears.hear(SIZE * 2)]
    assert len(marked(mark)) > len(pids)
    os.kill(parent.pid, number)
    parent.wait()
    all_gone(pids, mark)


def test_a_frozen_worker_dies_with_the_fork_server(own: Node, ears: Ears) -> None:
    """Also one that is stopped by SIGSTOP, and its stopped child."""
    pids = family(own, ears)
    for pid in pids[:3]:
        send(pid, signal.SIGSTOP)
    send(own.supervisor.server_pid)
    own.wait(WorkersExited)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
