"""A fork server that is killed: its reserve takes its place, imports nothing again, and finds nothing of it left."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.node.messages import Ready
from tests.node.harness import (
    Ears,
    Node,
    basic_env,
    children_of,
    is_listening,
    marked,
    reserve_of,
    send,
    until,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.node.test_lease import Agent, keeper, renew
from tests.node.test_no_orphans import all_gone, family

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def counting(tmp_path: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A node whose fork server imports a module that counts how often it is imported."""
    (tmp_path / "counted.py").write_text("import os\nopen(os.environ['COUNT'], 'a').write('.')")
    env = basic_env(mark) | {"PYTHONPATH": str(tmp_path), "COUNT": str(tmp_path / "count")}
    node = Node(env=env, preload=("counted",))
    node.move_to(tmp_path, mark, ears)
    node.start()
    yield node
    node.supervisor.close()


def imports(node: Node) -> int:
    return len((node.folder / "count").read_text())


def runs(node: Node) -> bool:
    """Whether an attempt does, and finds the module imported."""
    script = node.script("import sys\nprint('counted' in sys.modules)", "next.py")
    return node.run(script).stdout() == "True\n"


def test_the_next_attempt_runs_without_importing_again(counting: Node, ears: Ears) -> None:
    """Again and again: each time its workers are told as failed when all of it is gone, and the store is back."""
    for _ in range(3):
        port = counting.open_store()
        pids = [*family(counting, ears, nproc=2), *counting.children()]
        reserve = counting.reserve()
        send(counting.supervisor.server_pid)
        failures = counting.wait(WorkersExited).failures
        assert [(failure.signal, failure.stopped) for failure in failures] == [("SIGKILL", False)] * 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert counting.wait(Ready).pid == reserve
        assert children_of(keeper(counting)) == {reserve}
        until(lambda port=port: is_listening(port), "the store is not back")
        assert runs(counting)
    assert imports(counting) == 1


def test_killed_while_it_starts_workers(counting: Node) -> None:
    """However many are there by then, the next attempt is alone."""
    script = counting.script("import time\ntime.sleep(3600)")
    for _ in range(5):
        counting.launch(script, nproc=4)
        send(counting.supervisor.server_pid)
        server = counting.wait(Ready).pid
        assert marked(counting.mark).keys() == {keeper(counting), server, counting.reserve()}
    assert runs(counting)
    assert imports(counting) == 1


def test_killed_while_it_stops_workers(counting: Node, ears: Ears) -> None:
    """`WorkersStopped` comes once, from the reserve's first turn at the latest; nothing of the attempt is a failure."""
    script = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\ntime.sleep(3600)"
    counting.launch(counting.script(script))
    ears.hear()
    counting.supervisor.stop(counting.attempt, 3600.0)
    ears.hear()
    send(counting.supervisor.server_pid)
    assert [failure.stopped for failure in counting.wait(WorkersStopped).failures] == [True]
    assert runs(counting)
    assert imports(counting) == 1


@pytest.mark.parametrize("first", ["server", "reserve"])
def test_killed_together_with_its_reserve(counting: Node, ears: Ears, first: str) -> None:
    """Another is started from nothing, when all is gone."""
    pids = family(counting, ears)
    both = [counting.supervisor.server_pid, counting.reserve()]
    for pid in both:
        send(pid, signal.SIGSTOP)  # so that neither does anything about the other
    for pid in both if first == "server" else both[::-1]:
        send(pid)
    counting.wait(WorkersExited)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert runs(counting)
    assert imports(counting) == 2


def test_a_reserve_that_was_stopped_goes_on_when_it_is_needed(counting: Node, ears: Ears) -> None:
    family(counting, ears)
    reserve = counting.reserve()
    send(reserve, signal.SIGSTOP)
    wait_stopped_by_signal(reserve)
    send(counting.supervisor.server_pid)
    assert counting.wait(Ready).pid == reserve
    assert runs(counting)


def test_a_reserve_that_is_killed_is_replaced(counting: Node, ears: Ears) -> None:
    """The workers do not notice; what ends one after the other is no more fed, and missed when it is too late."""
    pids = family(counting, ears)

    def kill() -> int:
        reserve = counting.reserve()
        send(reserve)
        return int(until(lambda: reserve != (found := counting.reserve()) and found, "no other one came"))

    reserve = kill()
    counting.wait(WorkersStarted)
    assert counting.silence(0.05) == []
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    send(counting.supervisor.server_pid)
    assert counting.wait(Ready).pid == reserve
    for _ in range(9):
        kill()
    send(counting.reserve())
    until(lambda: not counting.reserve(), "there is yet another one")
    assert runs(counting)
    send(counting.supervisor.server_pid)
    counting.wait(Ready)
    assert imports(counting) == 2


def test_a_reserve_has_no_part_in_what_ends(counting: Node, ears: Ears, mark: str) -> None:
    """Where the lease is over, nothing follows a fork server that is killed."""
    pids = family(counting, ears)
    server = counting.supervisor.server_pid
    send(server, signal.SIGSTOP)
    wait_stopped_by_signal(server)
    renew(counting, 0.05)
    time.sleep(0.1)
    send(server)
    assert counting.wait(Ready).start_method == ""
    all_gone(pids, mark)
    assert imports(counting) == 1


def test_a_stopped_fork_server_goes_with_its_keeper(counting: Node, ears: Ears) -> None:
    """It is woken, and ends all that it has started, those that left their groups too."""
    pids = family(counting, ears)
    server, reserve = counting.supervisor.server_pid, counting.reserve()
    for pid in (server, reserve):
        send(pid, signal.SIGSTOP)
        wait_stopped_by_signal(pid)
    send(keeper(counting))
    for pid in (*pids, server, reserve):
        wait_gone(pid)
    counting.wait(WorkersExited)
    assert runs(counting)


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
STEPS: dict[str, list[tuple[str, int]]] = {
    "while the reserve takes over": [("agent", STOP), ("server", KILL)],
    "with a stopped reserve": [("reserve", STOP)],
    "with both stopped": [("server", STOP), ("reserve", STOP)],
    "after the fork server, with a stopped keeper": [("keeper", STOP), ("server", KILL)],
    "with the keeper, both stopped": [("server", STOP), ("reserve", STOP), ("keeper", KILL)],
}


def take(steps: list[tuple[str, int]], agent: Agent) -> int:
    """Stop and kill these, and the agent last; the reserve's process id."""
    reserve = reserve_of(agent.server)
    known = {"agent": agent.process.pid, "keeper": agent.keeper, "server": agent.server, "reserve": reserve}
    for name, number in steps:
        send(known[name], number)
        if number == STOP:
            wait_stopped_by_signal(known[name])
    agent.end()
    assert reserve
    return reserve


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_an_agent_is_killed(tmp_path: Path, mark: str, ears: Ears, steps: list[tuple[str, int]]) -> None:
    """Whatever else is stopped or killed before it: all that it has started goes."""
    agent = Agent(tmp_path, mark, ears, lease=0.0)
    take(steps, agent)
    all_gone(agent.pids, mark)


@pytest.mark.parametrize("order", [("server", "keeper"), ("keeper", "server")], ids="-".join)
def test_a_stopped_reserve_is_not_left_by_all_others(tmp_path: Path, mark: str, ears: Ears, order: list[str]) -> None:
    """Nobody is left who could end it: the kernel wakes it, and it goes."""
    agent = Agent(tmp_path, mark, ears, lease=0.0)
    wait_gone(take([("reserve", STOP), *((name, KILL) for name in order)], agent))
    for pid in marked(mark):  # those that left their groups, with nobody to find them
        with contextlib.suppress(ProcessLookupError):
            send(pid)
