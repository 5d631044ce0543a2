"""A fork server is killed: its hot standby takes over, imports nothing again, and none of the old processes is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.node.forkserver import hot_standby
from raylaunch.node.protocol.messages import Ready, StopWorkers
from tests.node.harness import (
    MessagePipe,
    Node,
    basic_env,
    children_of,
    hot_standby_of,
    is_listening,
    marked,
    send_signal,
    until,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.node.protocol.test_lease_page import Agent, renew_lease, subreaper_of
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


def test_the_next_attempt_runs_without_importing_again(counted_node: Node, pipe: MessagePipe) -> None:
    """Three times: its workers are reported as failed once all of them are gone, and the store is open again."""
    for _ in range(3):
        port = counted_node.open_store()
        pids = [*start_process_tree(counted_node, pipe, nproc=2), *counted_node.children()]
        standby = counted_node.hot_standby()
        server = counted_node.supervisor.server_pid
        send_signal(server)
        failures = counted_node.wait(WorkersExited).failures
        assert {failure.what for failure in failures} == {
            f"was killed by SIGKILL (together with the fork server (process {server}))"
        }
        assert [failure.stopped for failure in failures] == [False] * 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert counted_node.wait(Ready).pid == standby
        assert children_of(subreaper_of(counted_node)) == {standby}
        until(lambda port=port: is_listening(port), "the store is not open again")
        assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 1


def test_kill_of_the_fork_server_while_it_starts_workers(counted_node: Node) -> None:
    """However many workers it had started, none is left when the hot standby is ready."""
    script = counted_node.script("import time\ntime.sleep(3600)")
    for _ in range(5):
        counted_node.launch(script, nproc=4)
        send_signal(counted_node.supervisor.server_pid)
        server = counted_node.wait(Ready).pid
        assert marked(counted_node.mark).keys() == {subreaper_of(counted_node), server, counted_node.hot_standby()}
    assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 1


def test_kill_of_the_fork_server_while_it_stops_workers(counted_node: Node, pipe: MessagePipe) -> None:
    """`WorkersStopped` comes once, and none of its failures counts as one of the attempt."""
    script = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\ntime.sleep(3600)"
    counted_node.launch(counted_node.script(script))
    pipe.read_lines()
    counted_node.supervisor.handle(StopWorkers(attempt=counted_node.attempt, grace=3600.0))
    pipe.read_lines()
    send_signal(counted_node.supervisor.server_pid)
    assert [failure.stopped for failure in counted_node.wait(WorkersStopped).failures] == [True]
    assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 1


@pytest.mark.parametrize("first", ["server", "standby"])
def test_kill_of_the_fork_server_and_its_hot_standby(counted_node: Node, pipe: MessagePipe, first: str) -> None:
    """A new fork server is started, and imports again, when all processes of the old one are gone."""
    pids = start_process_tree(counted_node, pipe)
    both = [counted_node.supervisor.server_pid, counted_node.hot_standby()]
    for pid in both:
        send_signal(pid, signal.SIGSTOP)  # so that neither can react to the end of the other
    for pid in both if first == "server" else both[::-1]:
        send_signal(pid)
    counted_node.wait(WorkersExited)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 2


def test_a_stopped_hot_standby_is_continued_when_it_takes_over(counted_node: Node, pipe: MessagePipe) -> None:
    start_process_tree(counted_node, pipe)
    standby = counted_node.hot_standby()
    send_signal(standby, signal.SIGSTOP)
    wait_stopped_by_signal(standby)
    send_signal(counted_node.supervisor.server_pid)
    assert counted_node.wait(Ready).pid == standby
    assert next_attempt_runs(counted_node)


@pytest.mark.parametrize(("lifetime", "lasts"), [(59.0, False), (60.0, True)])
def test_standbys_that_die_now_and_then_are_replaced_for_ever(
    monkeypatch: pytest.MonkeyPatch, lifetime: float, lasts: bool
) -> None:
    """The limit is for those that die one soon after the other."""
    now = [0.0]
    monkeypatch.setattr(hot_standby, "time", SimpleNamespace(monotonic=lambda: now[0]))
    standby = hot_standby.HotStandby(wanted=True, send=lambda _event, _fd: None)
    gone = 2**22 + 1  # more than any process id
    for _ in range(11):
        standby.adopt(gone, os.open(os.devnull, os.O_RDONLY))
        now[0] += lifetime
        standby.reaped([gone])
    assert standby.is_wanted == lasts


def test_a_killed_hot_standby_is_replaced(counted_node: Node, pipe: MessagePipe) -> None:
    """The workers run on. After ten deaths it is not replaced any more, and a new fork server imports again."""
    pids = start_process_tree(counted_node, pipe)

    def kill() -> int:
        standby = counted_node.hot_standby()
        send_signal(standby)
        return int(
            until(
                lambda: standby != (found := counted_node.hot_standby()) and found, "no other hot standby was started"
            )
        )

    standby = kill()
    counted_node.wait(WorkersStarted)
    assert counted_node.events_within(0.05) == []
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    send_signal(counted_node.supervisor.server_pid)
    assert counted_node.wait(Ready).pid == standby
    for _ in range(9):
        kill()
    send_signal(counted_node.hot_standby())
    until(lambda: not counted_node.hot_standby(), "there is another hot standby")
    assert next_attempt_runs(counted_node)
    send_signal(counted_node.supervisor.server_pid)
    counted_node.wait(Ready)
    assert import_count(counted_node) == 2


def test_the_hot_standby_does_not_take_over_after_the_lease(counted_node: Node, pipe: MessagePipe, mark: str) -> None:
    """If the lease has expired, a killed fork server has no successor."""
    pids = start_process_tree(counted_node, pipe)
    server = counted_node.supervisor.server_pid
    send_signal(server, signal.SIGSTOP)
    wait_stopped_by_signal(server)
    renew_lease(counted_node, 0.05)
    time.sleep(0.1)
    send_signal(server)
    assert not counted_node.wait(Ready).torch
    wait_all_gone(pids, mark)
    assert import_count(counted_node) == 1


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_the_fork_server_takes_the_place_of_its_subreaper(counted_node: Node, pipe: MessagePipe, stopped: bool) -> None:
    """The hot standby serves then, imports nothing again, and no process of the attempt is left. Twice.

    The same if fork server and standby were stopped by SIGSTOP: they are continued.
    """
    for _ in range(2):
        pids = [*start_process_tree(counted_node, pipe, nproc=2), *counted_node.children()]
        server, standby = counted_node.supervisor.server_pid, counted_node.hot_standby()
        for pid in (server, standby) if stopped else ():
            send_signal(pid, signal.SIGSTOP)
            wait_stopped_by_signal(pid)
        subreaper = subreaper_of(counted_node)
        send_signal(subreaper)
        failures = counted_node.wait(WorkersExited).failures
        assert {failure.what for failure in failures} == {
            f"was killed by SIGKILL (together with the subreaper (process {subreaper}))"
        }
        assert [failure.stopped for failure in failures] == [False] * 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert counted_node.wait(Ready).pid == standby
        assert subreaper_of(counted_node) == server
        assert children_of(server) == {standby}
        assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 1


def test_a_killed_fork_server_whose_subreaper_was_killed_before(counted_node: Node, pipe: MessagePipe) -> None:
    """The standby is promoted by the one process and the other in turn; at the end nothing is left."""
    for _ in range(2):
        for victim in (subreaper_of(counted_node), counted_node.hot_standby()):  # this one serves by then
            start_process_tree(counted_node, pipe)
            standby = counted_node.hot_standby()
            send_signal(victim)
            counted_node.wait(WorkersExited)
            assert counted_node.wait(Ready).pid == standby
            until(counted_node.hot_standby, "there is no other standby")
    assert next_attempt_runs(counted_node)
    assert import_count(counted_node) == 1
    counted_node.supervisor.close()
    assert marked(counted_node.mark) == {}


@pytest.mark.parametrize("stopped", [[], ["subreaper"], ["subreaper", "server"]], ids=["", "subreaper", "both"])
def test_the_new_subreaper_ends_all_with_the_agent(
    tmp_path: Path, mark: str, pipe: MessagePipe, stopped: list[str]
) -> None:
    """The kernel continues it, if it is stopped, and it continues the fork server."""
    agent = Agent(tmp_path, mark, pipe, lease=0.0)
    pids = {"subreaper": agent.server, "server": hot_standby_of(agent.server)}
    send_signal(agent.subreaper)
    until(lambda: hot_standby_of(pids["server"]), "the hot standby does not serve")
    for name in stopped:
        send_signal(pids[name], signal.SIGSTOP)
        wait_stopped_by_signal(pids[name])
    agent.end()
    wait_all_gone(agent.pids, mark)


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
STEPS: dict[str, list[tuple[str, int]]] = {
    "while the hot standby takes over": [("agent", STOP), ("server", KILL)],
    "with a stopped hot standby": [("standby", STOP)],
    "with both stopped": [("server", STOP), ("standby", STOP)],
    "after the fork server, with a stopped subreaper": [("subreaper", STOP), ("server", KILL)],
    "with the subreaper, both stopped": [("server", STOP), ("standby", STOP), ("subreaper", KILL)],
}


def stop_and_kill(steps: list[tuple[str, int]], agent: Agent) -> int:
    """Stop and kill these processes, then kill the agent; return the hot standby's process id."""
    standby = hot_standby_of(agent.server)
    known = {"agent": agent.process.pid, "subreaper": agent.subreaper, "server": agent.server, "standby": standby}
    for name, number in steps:
        send_signal(known[name], number)
        if number == STOP:
            wait_stopped_by_signal(known[name])
    agent.end()
    assert standby
    return standby


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_all_processes_end_with_their_agent(
    tmp_path: Path, mark: str, pipe: MessagePipe, steps: list[tuple[str, int]]
) -> None:
    """Whatever was stopped or killed before the agent."""
    agent = Agent(tmp_path, mark, pipe, lease=0.0)
    stop_and_kill(steps, agent)
    wait_all_gone(agent.pids, mark)


@pytest.mark.parametrize("order", [("server", "subreaper"), ("subreaper", "server")], ids="-".join)
def test_a_stopped_hot_standby_ends_though_all_others_are_gone(
    tmp_path: Path, mark: str, pipe: MessagePipe, order: list[str]
) -> None:
    """No process is left that could kill it: the kernel continues it, and it exits."""
    agent = Agent(tmp_path, mark, pipe, lease=0.0)
    wait_gone(stop_and_kill([("standby", STOP), *((name, KILL) for name in order)], agent))

    def kill_the_rest() -> bool:
        """Kill those that left their process groups: no process is left that knows them. One may just be forking."""
        pids = marked(mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                send_signal(pid)
        return not pids

    until(kill_the_rest, "processes that left their process groups do not end")
