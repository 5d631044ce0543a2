"""A node whose lease has expired has no workers, whichever of its own processes is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.node.protocol.node_goal import StopWorkers
from raylaunch.node.protocol.node_status import Ready
from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.shared_page import LEASE_EXPIRES_AT, SharedPage, lease_clock
from tests.node.harness import (
    MessagePipe,
    Node,
    basic_env,
    marked,
    send_signal,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.node.test_no_orphans import TREE_SIZE, start_process_tree, wait_all_gone

pytestmark = pytest.mark.timeout(300)


def renew_lease(node: Node, seconds: float) -> None:
    node.supervisor.renew_lease(lease_clock() + int(seconds * 1e9))


def start_workers(node: Node, pipe: MessagePipe, nproc: int = 1) -> list[int]:
    """Start workers with descendants, and wait for `WorkersStarted`; return the process ids of all."""
    pids = start_process_tree(node, pipe, nproc)
    node.wait(WorkersStarted)
    return pids


def subreaper_of(node: Node) -> int:
    return node.supervisor.client.subreaper_pid


def test_a_lease_expires_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC does not count that time."""
    page, fd = SharedPage.create()
    page.numbers[LEASE_EXPIRES_AT] = lease_clock() + 3600 * 10**9
    assert not page.lease_has_expired
    slept = lease_clock() + 7200 * 10**9
    monkeypatch.setattr(shared_page, "lease_clock", lambda: slept)
    assert page.lease_has_expired
    os.close(fd)


def test_workers_end_with_the_lease(own_node: Node, pipe: MessagePipe, mark: str) -> None:
    """So do their descendants and the fork server.

    The workers are not reported as failed, and no fork server is started.
    """
    pids = start_workers(own_node, pipe, nproc=2)
    renew_lease(own_node, 0.3)
    ready = own_node.wait(Ready)
    assert not ready.torch
    assert "nothing was heard of the driver" in ready.why[0]
    wait_all_gone(pids, mark)
    assert own_node.events_within(0.1) == []


def test_workers_live_as_long_as_the_lease_is_renewed(own_node: Node, pipe: MessagePipe) -> None:
    """The lease expires at the time of its last renewal, not earlier."""
    pids = start_workers(own_node, pipe)
    for _ in range(45):
        renew_lease(own_node, 4.0)
        assert own_node.events_within(0.1) == []
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    began = time.monotonic()
    renew_lease(own_node, 4.0)
    own_node.wait(Ready)
    assert time.monotonic() - began >= 4.0


def test_a_lease_that_is_withdrawn_does_not_expire(own_node: Node, pipe: MessagePipe) -> None:
    """0 means that there is no lease any more."""
    start_workers(own_node, pipe)
    renew_lease(own_node, 3.0)
    own_node.supervisor.renew_lease(0)
    assert own_node.events_within(3.3) == []


def test_a_shorter_lease_counts_at_once(own_node: Node, pipe: MessagePipe) -> None:
    """Also for a fork server that sleeps until the longer one expires."""
    start_workers(own_node, pipe)
    renew_lease(own_node, 3600.0)
    own_node.events_within(0.1)
    renew_lease(own_node, 0.1)
    own_node.wait(Ready)


def test_an_expired_lease_stays_expired(own_node: Node, pipe: MessagePipe) -> None:
    """Neither a late renewal nor another order starts the node again."""
    pids = start_workers(own_node, pipe)
    renew_lease(own_node, 0.1)
    for pid in pids:
        wait_gone(pid)
    renew_lease(own_node, 3600.0)
    own_node.launch(own_node.script("say('back')"))
    assert [type(event) for event in own_node.events_within(0.3)] == [Ready]


def test_a_stop_is_completed_when_the_lease_expires(own_node: Node, pipe: MessagePipe) -> None:
    """`WorkersStopped` means that no process is left, whatever killed them."""
    own_node.launch(
        own_node.script(
            "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\nwhile True: time.sleep(1)"
        )
    )
    pipe.read_lines()
    own_node.supervisor.handle(StopWorkers(attempt=own_node.attempt, grace=30.0))
    pipe.read_lines()
    renew_lease(own_node, 0.1)
    stopped = own_node.wait(WorkersStopped)
    assert [(late.signal, late.stopped) for late in stopped.failures] == [("SIGKILL", True)]


def test_a_continued_fork_server_carries_out_no_order_after_the_lease(
    own_node: Node, pipe: MessagePipe, mark: str
) -> None:
    """Not even one that was sent before the lease expired."""
    pids = start_workers(own_node, pipe)
    send_signal(own_node.supervisor.client.pid, signal.SIGSTOP)
    wait_stopped_by_signal(own_node.supervisor.client.pid)
    own_node.launch(own_node.script("say('late')\nimport time\ntime.sleep(3600)", "late.py"))
    renew_lease(own_node, 0.05)
    time.sleep(0.1)
    send_signal(own_node.supervisor.client.pid, signal.SIGCONT)
    own_node.wait(Ready)
    wait_all_gone(pids, mark)
    assert not own_node.rank_folder().exists()


STOPPED: dict[str, Callable[[Node], list[int]]] = {
    "fork server": lambda node: [node.supervisor.client.pid],
    "subreaper": lambda node: [subreaper_of(node)],
    "both": lambda node: [subreaper_of(node), node.supervisor.client.pid],
    "everything": lambda node: list(marked(node.mark)),
}


@pytest.mark.parametrize("stopped", STOPPED.values(), ids=STOPPED)
def test_close_kills_stopped_processes(
    own_node: Node, pipe: MessagePipe, mark: str, stopped: Callable[[Node], list[int]]
) -> None:
    """They cannot see that the lease has expired. The agent does, and closes the node."""
    pids = start_workers(own_node, pipe)
    for pid in stopped(own_node):
        send_signal(pid, signal.SIGSTOP)
        wait_stopped_by_signal(pid)
    renew_lease(own_node, 0.05)
    own_node.supervisor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


def test_a_stopped_subreaper_does_not_delay_a_restart(own_node: Node, pipe: MessagePipe) -> None:
    """The fork server is killed while the subreaper, which reaps its orphans, is stopped."""
    pids = start_workers(own_node, pipe)
    send_signal(subreaper_of(own_node), signal.SIGSTOP)
    wait_stopped_by_signal(subreaper_of(own_node))
    send_signal(own_node.supervisor.client.pid)
    assert own_node.wait(WorkersExited).failures[0].pid == pids[0]
    own_node.wait(Ready)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert own_node.run(own_node.script("print('again')", "next.py")).stdout() == "again\n"


# With the supervisor in a process of its own, as in an agent.

AGENT = """
import sys, time
from pathlib import Path
from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.shared_page import lease_clock
from tests.node.harness import MessagePipe, Node
from tests.node.test_no_orphans import PROCESS_TREE

class WriteOnlyPipe(MessagePipe):
    def __init__(self, path):
        self.path = path

folder, mark, path, seconds = sys.argv[1:]
node = Node(preload=())
node.supervisor.spec.env["RAYLAUNCH_TEST_MARK"] = mark
node.use_for_test(Path(folder), mark, WriteOnlyPipe(path))
node.start()
print(node.supervisor.client.subreaper_pid, node.supervisor.client.pid, flush=True)
node.open_store()
node.launch(node.script(PROCESS_TREE), nproc=2)
while True:
    if float(seconds):
        node.supervisor.renew_lease(lease_clock() + int(float(seconds) * 1e9))
    for event in node.events_within(0.05):
        print(type(event).__name__, flush=True)
"""


class Agent:
    """A supervisor in a process of its own, which renews its lease all the time and prints the names of its events."""

    def __init__(self, folder: Path, mark: str, pipe: MessagePipe, lease: float) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(folder), mark, str(pipe.path), str(lease)],
            env=basic_env(mark) | {"PYTHONPATH": str(root)},
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.event_names = self.process.stdout
        self.subreaper, self.server = map(int, self.event_names.readline().split())
        self.pids = [int(line) for line in pipe.read_lines(TREE_SIZE * 2)]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.event_names.close()


def test_the_workers_of_a_stopped_agent_end(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """The fork server kills them and exits. When the agent is continued, it reports none of them as failed."""
    agent = Agent(tmp_path, mark, pipe, lease=5.0)
    assert agent.event_names.readline() == "WorkersStarted\n"
    agent.process.send_signal(signal.SIGSTOP)
    wait_stopped_by_signal(agent.process.pid)
    for pid in (*agent.pids, agent.server):
        wait_gone(pid)
    assert set(marked(mark)) - {agent.subreaper} == {agent.process.pid}
    agent.process.send_signal(signal.SIGCONT)
    assert agent.event_names.readline() == "Ready\n"
    agent.end()


@pytest.mark.parametrize("stopped", [("server",), ("subreaper",), ("subreaper", "server")], ids="-".join)
def test_an_agent_is_killed_while_others_are_stopped(
    tmp_path: Path, mark: str, pipe: MessagePipe, stopped: tuple[str, ...]
) -> None:
    """Either the fork server or the subreaper kills the rest. If both are stopped, they do when they are continued."""
    agent = Agent(tmp_path, mark, pipe, lease=0.0)
    for name in stopped:
        send_signal(getattr(agent, name), signal.SIGSTOP)
        wait_stopped_by_signal(getattr(agent, name))
    agent.end()
    if len(stopped) > 1:
        send_signal(agent.subreaper, signal.SIGCONT)
    wait_all_gone(agent.pids, mark)


def test_all_processes_are_stopped_for_longer_than_the_lease(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """Like a host that slept: when they are continued, in whatever order, no worker is left and none is started."""
    agent = Agent(tmp_path, mark, pipe, lease=5.0)
    assert agent.event_names.readline() == "WorkersStarted\n"
    everything = [agent.process.pid, agent.subreaper, agent.server, *agent.pids]
    for pid in everything:
        send_signal(pid, signal.SIGSTOP)
    time.sleep(5.1)
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):  # a worker that the fork server has killed meanwhile
            send_signal(pid, signal.SIGCONT)
    assert agent.event_names.readline() == "Ready\n"
    for pid in agent.pids:
        wait_gone(pid)
    assert set(marked(mark)) == {agent.process.pid}
    agent.end()
