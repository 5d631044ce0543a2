"""A fork server or its subreaper is killed: both are started again, and none of the old processes is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStopped
from raylaunch.node.protocol.node_goal import StopWorkers
from raylaunch.node.protocol.node_status import Ready
from tests.node.harness import (
    MessagePipe,
    Node,
    basic_env,
    go,
    hold,
    is_listening,
    marked,
    send_signal,
    until,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.node.test_lease import Agent, renew_lease, subreaper_of
from tests.node.test_no_orphans import start_process_tree, wait_all_gone

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def counted_node(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node whose fork server imports a module that counts how often it is imported."""
    (tmp_path / "counted.py").write_text("import os\nopen(os.environ['COUNT'], 'a').write('.')")
    env = basic_env(mark) | {"PYTHONPATH": str(tmp_path), "COUNT": str(tmp_path / "count")}
    node = Node(env=env, preload=("counted",))
    node.use_for_test(tmp_path, mark, pipe)
    node.start()
    yield node
    node.supervisor.close()


def import_count(node: Node) -> int:
    return len((node.folder / "count").read_text())


def next_attempt_runs(node: Node) -> bool:
    """Run an attempt; return whether it ran and found the module imported."""
    script = node.script("import sys\nprint('counted' in sys.modules)", "next.py")
    return node.run(script).stdout() == "True\n"


def test_a_killed_fork_server_is_started_again(counted_node: Node, pipe: MessagePipe) -> None:
    """Twice: its workers are reported as failed, and the store is open again at its port when all of them are gone."""
    for count in (2, 3):
        port = counted_node.open_store()
        pids = [*start_process_tree(counted_node, pipe, nproc=2), *counted_node.children()]
        server = counted_node.supervisor.client.pid
        send_signal(server)
        failures = counted_node.wait(WorkersExited).failures
        assert {failure.what for failure in failures} == {
            f"was killed by SIGKILL (together with the fork server (process {server}))"
        }
        assert [failure.stopped for failure in failures] == [False] * 2
        assert counted_node.wait(Ready).pid != server
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        until(lambda port=port: is_listening(port), "the store is not open again")
        assert next_attempt_runs(counted_node)
        assert import_count(counted_node) == count


def test_kill_of_the_fork_server_while_it_starts_workers(counted_node: Node) -> None:
    """However many workers it had started, none is left when the next one is ready."""
    script = counted_node.script("import time\ntime.sleep(3600)")
    for _ in range(3):
        counted_node.launch(script, nproc=4)
        send_signal(counted_node.supervisor.client.pid)
        server = counted_node.wait(Ready).pid
        assert marked(counted_node.mark).keys() == {subreaper_of(counted_node), server}
    assert next_attempt_runs(counted_node)


def test_kill_of_the_fork_server_while_it_stops_workers(counted_node: Node, pipe: MessagePipe) -> None:
    """`WorkersStopped` comes once, and none of its failures counts as one of the attempt."""
    script = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\ntime.sleep(3600)"
    counted_node.launch(counted_node.script(script))
    pipe.read_lines()
    counted_node.supervisor.handle(StopWorkers(attempt=counted_node.attempt, grace=3600.0))
    pipe.read_lines()
    send_signal(counted_node.supervisor.client.pid)
    assert [failure.stopped for failure in counted_node.wait(WorkersStopped).failures] == [True]
    assert next_attempt_runs(counted_node)


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_a_killed_subreaper_is_started_again(counted_node: Node, pipe: MessagePipe, stopped: bool) -> None:
    """The fork server ends what it has started, also if it was stopped by SIGSTOP: the kernel continues it."""
    pids = [*start_process_tree(counted_node, pipe, nproc=2), *counted_node.children()]
    subreaper, server = subreaper_of(counted_node), counted_node.supervisor.client.pid
    if stopped:
        send_signal(server, signal.SIGSTOP)
        wait_stopped_by_signal(server)
    send_signal(subreaper)
    failures = counted_node.wait(WorkersExited).failures
    assert {failure.what for failure in failures} == {
        f"was killed by SIGKILL (together with the subreaper (process {subreaper}))"
    }
    assert [failure.stopped for failure in failures] == [False] * 2
    counted_node.wait(Ready)
    for pid in (*pids, server):
        wait_gone(pid)
    assert next_attempt_runs(counted_node)
    assert subreaper_of(counted_node) != subreaper


@pytest.fixture
def impatient_node(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node whose helpers wait a short time, where nobody waits with them, for the end of what they kill."""
    short = (
        "from raylaunch.node.linux import processes\nassert processes.CLEANUP_SECONDS\nprocesses.CLEANUP_SECONDS = 0.1"
    )
    (tmp_path / "sitecustomize.py").write_text(short)
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=())
    node.use_for_test(tmp_path, mark, pipe)
    node.start()
    yield node
    node.supervisor.close()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("killed", ["fork server", "subreaper"])
def test_workers_that_take_long_to_end_are_waited_for(
    impatient_node: Node, pipe: MessagePipe, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Their node goes on meanwhile, and says that they failed. Another fork server is started when they have ended."""
    monkeypatch.setattr("raylaunch.node.supervisor.forkserver_client._END_SECONDS", 1000)
    impatient_node.launch(impatient_node.script("import os, time\nsay(os.getpid())\ntime.sleep(3600)"))
    (pid,) = map(int, pipe.read_lines())
    hold(pid)
    server = impatient_node.supervisor.client.pid
    send_signal(server if killed == "fork server" else subreaper_of(impatient_node))
    (failure,) = impatient_node.wait(WorkersExited).failures
    assert f"together with the {killed}" in failure.what
    impatient_node.supervisor.handle(StopWorkers(attempt=impatient_node.attempt, grace=0.0))
    assert impatient_node.events_within(1.0) == []
    go(pid)
    impatient_node.wait(WorkersStopped)
    assert impatient_node.wait(Ready).pid != server
    assert impatient_node.run(impatient_node.script("print('well')")).stdout() == "well\n"


def test_a_fork_server_is_not_started_again_after_the_lease(counted_node: Node, pipe: MessagePipe, mark: str) -> None:
    """Even if it could not end itself in time, and was killed."""
    pids = start_process_tree(counted_node, pipe)
    server = counted_node.supervisor.client.pid
    send_signal(server, signal.SIGSTOP)
    wait_stopped_by_signal(server)
    renew_lease(counted_node, 0.05)
    time.sleep(0.1)
    send_signal(server)
    assert not counted_node.wait(Ready).torch
    wait_all_gone(pids, mark)
    assert import_count(counted_node) == 1


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
STEPS: dict[str, list[tuple[str, int]]] = {
    "after the fork server": [("agent", STOP), ("server", KILL)],
    "after the subreaper": [("agent", STOP), ("subreaper", KILL)],
    "after the fork server, with a stopped subreaper": [("subreaper", STOP), ("server", KILL)],
    "after the subreaper, with a stopped fork server": [("server", STOP), ("subreaper", KILL)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_all_processes_end_with_their_agent(
    tmp_path: Path, mark: str, pipe: MessagePipe, steps: list[tuple[str, int]]
) -> None:
    """Whatever was stopped or killed before the agent."""
    agent = Agent(tmp_path, mark, pipe, lease=0.0)
    known = {"agent": agent.process.pid, "subreaper": agent.subreaper, "server": agent.server}
    for name, number in steps:
        send_signal(known[name], number)
        if number == STOP:
            wait_stopped_by_signal(known[name])
    agent.end()
    wait_all_gone(agent.pids, mark)


LONG_IMPORT = """
import os, signal, time

def end(*_):
    open(os.environ["COUNT"], "a").write("asked to end")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
open(os.environ["COUNT"], "a").write("begun, ")
time.sleep(1000)
"""


def test_a_fork_server_that_imports_ends_with_its_agent(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """It is not waited for: to import torch takes seconds, and a person may have pressed Ctrl-C meanwhile."""
    (tmp_path / "long.py").write_text(LONG_IMPORT)
    said = tmp_path / "said"
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path), "COUNT": str(said)}, preload=("long",))
    node.use_for_test(tmp_path, mark, pipe)
    node.supervisor.start()
    until(lambda: said.exists() and said.read_text(), "the import to begin")
    node.supervisor.close()
    assert said.read_text() == "begun, asked to end", "it was killed when its time was over"
    assert not marked(mark)


def test_the_subreaper_imports_nothing_of_workers() -> None:
    """It stays small, and runs as long as the node."""
    code = "import sys, raylaunch.node.forkserver.subreaper as _\nprint(*(n for n in sys.modules if n.startswith('raylaunch.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[1] for name in found} == {"node"}
