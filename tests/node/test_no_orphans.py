"""Whatever process is killed, none is left: no worker, no child of one, and none that moved to a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStopped
from raylaunch.node.protocol.node_goal import OpenStore, StopWorkers
from raylaunch.node.protocol.node_status import Ready, StoreOpened
from tests.node.harness import (
    MessagePipe,
    Node,
    basic_env,
    children_of,
    is_listening,
    marked,
    send_signal,
    started_for_test,
    until,
    wait_gone,
    wait_none_left,
)

pytestmark = pytest.mark.timeout(300)

PROCESS_TREE = """
    import multiprocessing, os, subprocess, time

    def wait():
        say(os.getpid())
        time.sleep(3600)

    say(os.getpid())
    say(subprocess.Popen(["sleep", "3600"]).pid)
    say(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
    # a process whose parent has exited, in a session of its own, with a child in another session
    say(subprocess.check_output(["sh", "-c", "setsid sh -c 'setsid sleep 3600 & sleep 3600' >/dev/null 2>&1 & echo $!"], text=True).strip())
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=wait).start()
    time.sleep(3600)
"""
TREE_SIZE = 6
"""The number of processes whose ids the script writes, one per line."""


def start_process_tree(node: Node, pipe: MessagePipe, nproc: int = 1) -> list[int]:
    """Start workers with all kinds of descendants; return the process ids of all."""
    node.launch(node.script(PROCESS_TREE), nproc=nproc)
    return [int(line) for line in pipe.read_lines(TREE_SIZE * nproc)]


def subreapers(mark: str) -> set[int]:
    """Return the process ids of our own children with the mark: the subreaper, once it has started."""
    return children_of(os.getpid()) & marked(mark).keys()


def wait_all_gone(pids: list[int], mark: str) -> None:
    for pid in pids:
        wait_gone(pid)
    wait_none_left(mark)


def test_kill_of_a_worker(node: Node, pipe: MessagePipe, mark: str) -> None:
    """When `WorkersStopped` arrives, the descendants of the killed worker are gone."""
    pids = start_process_tree(node, pipe)
    send_signal(pids[0])
    (failure,) = node.wait(WorkersExited).failures
    assert (failure.pid, failure.signal) == (pids[0], "SIGKILL")
    node.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


def test_kill_of_a_worker_then_the_next_attempt(node: Node, pipe: MessagePipe) -> None:
    """The next attempt starts after the last descendant is gone."""
    pids = start_process_tree(node, pipe)
    send_signal(pids[0])
    node.wait(WorkersExited)
    text = f"import os\nprint([pid for pid in {pids} if os.path.exists(f'/proc/{{pid}}')])"
    assert node.run(node.script(text, "next.py")).stdout() == "[]\n"


def test_kill_of_the_fork_server(own_node: Node, pipe: MessagePipe) -> None:
    """Its workers are reported as failed, all orphans are killed, and a new fork server runs the next attempt."""
    pids = start_process_tree(own_node, pipe, nproc=2)
    old = own_node.supervisor.client.pid
    send_signal(old)
    exited = own_node.wait(WorkersExited)
    assert sorted((failure.rank, failure.signal, failure.stopped) for failure in exited.failures) == [
        (0, "SIGKILL", False),
        (1, "SIGKILL", False),
    ]
    assert own_node.wait(Ready).pid != old
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert own_node.run(own_node.script("print('again')", "next.py")).stdout() == "again\n"


@pytest.fixture
def own_torch_node(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node for this test alone, with torch imported."""
    yield from started_for_test(Node(env=basic_env(mark), preload=("torch",)), tmp_path, mark, pipe)


def test_the_next_store_outlives_the_fork_server(own_torch_node: Node, pipe: MessagePipe) -> None:
    """After the fork server's death the next attempt's store has the same port, and workers meet there."""
    start_process_tree(own_torch_node, pipe)
    port = own_torch_node.open_store()
    assert is_listening(port)
    send_signal(own_torch_node.supervisor.client.pid)
    own_torch_node.wait(WorkersExited)
    script = own_torch_node.script("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print(dist.get_world_size())
        dist.destroy_process_group()
    """)
    outcome = own_torch_node.run(script, nproc=2, port=port)  # before the new fork server is ready
    assert outcome.stdout() == "2\n", outcome.stderr()


def test_orders_to_a_killed_fork_server_are_completed(own_node: Node, pipe: MessagePipe) -> None:
    """A pending stop leads to `WorkersStopped`, and a requested store is opened."""
    own_node.launch(
        own_node.script(
            "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\nwhile True: time.sleep(1)"
        )
    )
    pipe.read_lines()
    own_node.supervisor.handle(StopWorkers(attempt=own_node.attempt, grace=30.0))
    assert pipe.read_lines() == ["term"]
    server = own_node.supervisor.client.pid
    send_signal(server, signal.SIGSTOP)
    own_node.supervisor.handle(OpenStore(attempt=own_node.attempt + 1))
    send_signal(server)
    stopped = own_node.wait(WorkersStopped)
    assert (stopped.attempt, [failure.stopped for failure in stopped.failures]) == (own_node.attempt, [True])
    assert is_listening(own_node.wait(StoreOpened).port)


@pytest.fixture
def unready_node(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node whose first fork server is busy with a preload until it is killed. The next one is not."""
    begun = tmp_path / "begun"
    text = (
        f"import os, time\nif not os.path.exists({str(begun)!r}):\n    open({str(begun)!r}, 'w')\n    time.sleep(3600)"
    )
    (tmp_path / "busy_once.py").write_text(text)
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=("busy_once",))
    node.use_for_test(tmp_path, mark, pipe)
    node.supervisor.start()
    until(begun.exists, "no fork server has begun its preload")
    yield node
    node.supervisor.close()


def test_kill_of_a_fork_server_that_is_not_ready(unready_node: Node, mark: str) -> None:
    """An attempt that had not started is no failure: the next fork server starts it, once."""
    node = unready_node
    node.launch(node.script("print('once')"))
    (subreaper,) = until(lambda: subreapers(mark), "no subreaper was started")
    (server,) = until(lambda: children_of(subreaper), "no fork server was started")
    send_signal(server)
    event = node.wait(WorkersExited)
    assert event.failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == "once\n"


def test_an_attempt_that_is_stopped_before_it_began_never_begins(unready_node: Node, mark: str) -> None:
    """Also if the fork server that should start it dies before it is ready."""
    node = unready_node
    node.launch(node.script("print('begun')"))
    (subreaper,) = until(lambda: subreapers(mark), "no subreaper was started")
    (server,) = until(lambda: children_of(subreaper), "no fork server was started")
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=0.0))
    send_signal(server)
    assert node.wait(WorkersStopped).attempt == node.attempt
    node.wait(Ready)
    node.open_store()  # the fork server has carried out all that it was told before
    assert node.supervisor.workers.pids is None


def test_fork_server_that_never_gets_ready(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """After three deaths in a row before it was ready, no more are started, and `Ready` says why."""
    (tmp_path / "runpy.py").write_text("import time\ntime.sleep(60)")  # imported by the fork server alone
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=())
    node.supervisor.start()
    killed: set[int] = set()
    events: list[object] = []

    def fork_server() -> set[int]:
        events.extend(node.events_within(0.01))
        with contextlib.suppress(FileNotFoundError):
            return {pid for subreaper in subreapers(mark) for pid in children_of(subreaper)} - killed
        return set()

    for _ in range(3):
        (found,) = until(fork_server, "no fork server was started")
        killed.add(found)
        send_signal(found)
    until(lambda: events.extend(node.events_within(0.01)) or events, "it is started again and again")
    (ready,) = events
    assert not ready.torch
    assert "dies again and again" in ready.why[-1]
    node.supervisor.close()


def test_kill_of_the_subreaper(own_node: Node, pipe: MessagePipe, mark: str) -> None:
    """The fork server's parent is killed: all its processes end, and new ones are started."""
    pids = start_process_tree(own_node, pipe)
    send_signal(*subreapers(mark))
    exited = own_node.wait(WorkersExited)
    assert [failure.rank for failure in exited.failures] == [0]
    for pid in pids:
        wait_gone(pid)
    assert own_node.run(own_node.script("print('again')", "next.py")).stdout() == "again\n"


def test_close_ends_everything(own_node: Node, pipe: MessagePipe, mark: str) -> None:
    """When `close` returns, no process is left."""
    pids = start_process_tree(own_node, pipe)
    own_node.open_store()
    own_node.supervisor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


PARENT = """
import os, sys
from pathlib import Path
from tests.node.harness import MessagePipe, Node
from tests.node.test_no_orphans import PROCESS_TREE

class WriteOnlyPipe(MessagePipe):
    def __init__(self, path):
        self.path = path

folder, mark, path = sys.argv[1:]
node = Node(preload=())
node.supervisor.spec.env["RAYLAUNCH_TEST_MARK"] = mark
node.use_for_test(Path(folder), mark, WriteOnlyPipe(path))
node.start()
node.open_store()
node.launch(node.script(PROCESS_TREE), nproc=2)
while True:
    node.events_within(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_kill_of_the_supervisors_own_process(
    tmp_path: Path, mark: str, pipe: MessagePipe, number: signal.Signals
) -> None:
    """However the supervisor's process ends, all processes of the node end within seconds."""
    root = Path(__file__).parents[2]
    env = basic_env(mark) | {"PYTHONPATH": str(root)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), mark, str(pipe.path)],
        env=env,
        cwd=root,
        stderr=subprocess.DEVNULL,
    )
    pids = [int(line) for line in pipe.read_lines(TREE_SIZE * 2)]
    assert len(marked(mark)) > len(pids)
    os.kill(parent.pid, number)
    parent.wait()
    wait_all_gone(pids, mark)


def test_stopped_workers_are_killed_with_the_fork_server(own_node: Node, pipe: MessagePipe) -> None:
    """Workers and children that SIGSTOP has stopped are killed too."""
    pids = start_process_tree(own_node, pipe)
    for pid in pids[:3]:
        send_signal(pid, signal.SIGSTOP)
    send_signal(own_node.supervisor.client.pid)
    own_node.wait(Ready)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
