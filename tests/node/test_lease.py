"""A node that hears nothing for too long has no workers any more, whoever of its own processes cannot see to it."""

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

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.node import lease
from raylaunch.node.messages import Ready
from raylaunch.worker.page import LEASE, Page, lease_clock
from tests.node.harness import (
    Ears,
    Node,
    basic_env,
    marked,
    send,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.node.test_no_orphans import SIZE, all_gone, family

pytestmark = pytest.mark.timeout(300)


def renew(node: Node, seconds: float) -> None:
    node.supervisor.renew(lease_clock() + int(seconds * 1e9))


def begin(node: Node, ears: Ears, nproc: int = 1) -> list[int]:
    """Workers with descendants; the process ids of all."""
    pids = family(node, ears, nproc)
    node.wait(WorkersStarted)
    return pids


def keeper(node: Node) -> int:
    assert node.supervisor._hearth._server is not None
    return node.supervisor._hearth._server.pid


def test_a_lease_is_over_after_a_sleep_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC stood still meanwhile."""
    page, fd = Page.create()
    page.numbers[LEASE] = lease_clock() + 3600 * 10**9
    assert not lease.is_over(page)
    slept = lease_clock() + 7200 * 10**9
    monkeypatch.setattr(lease, "lease_clock", lambda: slept)
    assert lease.is_over(page)
    os.close(fd)


def test_workers_end_with_the_lease(own: Node, ears: Ears, mark: str) -> None:
    """All they have started too, and the fork server; not as failures of theirs, and there is no other fork server."""
    pids = begin(own, ears, nproc=2)
    renew(own, 0.3)
    over = own.wait(Ready)
    assert over.start_method == ""
    assert "nothing was heard of the driver" in over.why[0]
    all_gone(pids, mark)
    assert own.silence(0.1) == []


def test_workers_live_as_long_as_the_lease_is_renewed(own: Node, ears: Ears) -> None:
    """Nobody else is told of it, and it is over as late as it was said last."""
    pids = begin(own, ears)
    for _ in range(30):
        renew(own, 2.0)
        assert own.silence(0.1) == []
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    began = time.monotonic()
    renew(own, 2.0)
    own.wait(Ready)
    assert time.monotonic() - began >= 2.0


def test_a_lease_without_an_end_ends_nothing(own: Node, ears: Ears) -> None:
    """The last word counts: that there is no lease any more."""
    begin(own, ears)
    renew(own, 1.5)
    own.supervisor.renew(0)
    assert own.silence(1.8) == []


def test_a_shorter_lease_counts_at_once(own: Node, ears: Ears) -> None:
    """Also for a fork server that sleeps until the longer one is over."""
    begin(own, ears)
    renew(own, 3600.0)
    own.silence(0.1)
    renew(own, 0.1)
    own.wait(Ready)


def test_what_is_over_stays_over(own: Node, ears: Ears, mark: str) -> None:
    """Neither a late renewal nor another order brings the node back."""
    pids = begin(own, ears)
    renew(own, 0.1)
    all_gone(pids, mark)
    renew(own, 3600.0)
    own.launch(own.script("say('back')"))
    assert [type(event) for event in own.silence(0.3)] == [Ready]


def test_a_stop_that_the_lease_overtook_is_answered(own: Node, ears: Ears) -> None:
    """`WorkersStopped` means that nothing is left, whatever ended it."""
    own.launch(
        own.script(
            "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\nwhile True: time.sleep(1)"
        )
    )
    ears.hear()
    own.supervisor.stop(own.attempt, 30.0)
    ears.hear()
    renew(own, 0.1)
    stopped = own.wait(WorkersStopped)
    assert [(late.signal, late.stopped) for late in stopped.failures] == [("SIGKILL", True)]


def test_a_fork_server_that_was_frozen_obeys_nothing_after_the_lease(own: Node, ears: Ears, mark: str) -> None:
    """An order that came before is not carried out when it goes on."""
    pids = begin(own, ears)
    send(own.supervisor.server_pid, signal.SIGSTOP)
    wait_stopped_by_signal(own.supervisor.server_pid)
    own.launch(own.script("say('late')\nimport time\ntime.sleep(3600)", "late.py"))
    renew(own, 0.05)
    time.sleep(0.1)
    send(own.supervisor.server_pid, signal.SIGCONT)
    all_gone(pids, mark)
    assert not own.rank_folder().exists()


FROZEN: dict[str, Callable[[Node], list[int]]] = {
    "fork server": lambda node: [node.supervisor.server_pid],
    "keeper": lambda node: [keeper(node)],
    "both": lambda node: [keeper(node), node.supervisor.server_pid],
    "everything": lambda node: list(marked(node.mark)),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_what_is_frozen_is_ended_by_close(
    own: Node, ears: Ears, mark: str, frozen: Callable[[Node], list[int]]
) -> None:
    """The agent's side of a lease that is over: a process that is stopped cannot see that it is."""
    pids = begin(own, ears)
    for pid in frozen(own):
        send(pid, signal.SIGSTOP)
        wait_stopped_by_signal(pid)
    renew(own, 0.05)
    own.supervisor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert marked(mark) == {}


def test_a_frozen_keeper_does_not_hold_up_a_restart(own: Node, ears: Ears) -> None:
    """The fork server dies, and the keeper that is to end its orphans is stopped: it goes on, and so does the node."""
    pids = begin(own, ears)
    send(keeper(own), signal.SIGSTOP)
    wait_stopped_by_signal(keeper(own))
    send(own.supervisor.server_pid)
    assert own.wait(WorkersExited).failures[0].pid == pids[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert own.run(own.script("print('again')", "next.py")).stdout() == "again\n"


# With a process of its own, as an agent has.

AGENT = """
import sys, time
from pathlib import Path
from raylaunch.worker.page import lease_clock
from tests.node.harness import Ears, Node
from tests.node.test_no_orphans import FAMILY

class Deaf(Ears):
    def __init__(self, path):
        self.path = path

folder, mark, path, seconds = sys.argv[1:]
node = Node(preload=())
node.supervisor.settings.env["RAYLAUNCH_TEST_MARK"] = mark
node.move_to(Path(folder), mark, Deaf(path))
node.start()
print(node.supervisor._hearth._server.pid, node.supervisor.server_pid, flush=True)
node.open_store()
node.launch(node.script(FAMILY), nproc=2)
while True:
    if float(seconds):
        node.supervisor.renew(lease_clock() + int(float(seconds) * 1e9))
    for event in node.silence(0.05):
        print(type(event).__name__, flush=True)
"""


class Agent:
    """A supervisor in a process of its own, that renews its lease all the time. Its words are the names of events."""

    def __init__(self, folder: Path, mark: str, ears: Ears, lease: float) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(folder), mark, str(ears.path), str(lease)],
            env=basic_env(mark) | {"PYTHONPATH": str(root)},
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.words = self.process.stdout
        self.keeper, self.server = map(int, self.words.readline().split())
        self.pids = [int(line) for line in ears.hear(SIZE * 2)]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.words.close()


def test_a_frozen_agent_loses_its_workers(tmp_path: Path, mark: str, ears: Ears) -> None:
    """While it is stopped, the fork server ends them and itself. When it goes on, it takes nothing of that for failures."""
    agent = Agent(tmp_path, mark, ears, lease=2.0)
    assert agent.words.readline() == "WorkersStarted\n"
    agent.process.send_signal(signal.SIGSTOP)
    wait_stopped_by_signal(agent.process.pid)
    for pid in (*agent.pids, agent.server):
        wait_gone(pid)
    assert set(marked(mark)) - {agent.keeper} == {agent.process.pid}
    agent.process.send_signal(signal.SIGCONT)
    assert agent.words.readline() == "Ready\n"
    agent.end()


@pytest.mark.parametrize("frozen", [("server",), ("keeper",), ("keeper", "server")], ids="-".join)
def test_an_agent_that_dies_beside_frozen_processes(
    tmp_path: Path, mark: str, ears: Ears, frozen: tuple[str, ...]
) -> None:
    """One of the two is enough to end everything; where both are stopped, they do when they go on."""
    agent = Agent(tmp_path, mark, ears, lease=0.0)
    for name in frozen:
        send(getattr(agent, name), signal.SIGSTOP)
        wait_stopped_by_signal(getattr(agent, name))
    agent.end()
    if len(frozen) > 1:
        send(agent.keeper, signal.SIGCONT)
    all_gone(agent.pids, mark)


def test_everything_frozen_beyond_the_lease(tmp_path: Path, mark: str, ears: Ears) -> None:
    """A host that slept: when it goes on, in whatever order, no worker is left and none is started."""
    agent = Agent(tmp_path, mark, ears, lease=3.0)
    assert agent.words.readline() == "WorkersStarted\n"
    everything = [agent.process.pid, agent.keeper, agent.server, *agent.pids]
    for pid in everything:
        send(pid, signal.SIGSTOP)
    time.sleep(3.1)
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):  # a worker that the fork server, which goes on, has ended
            send(pid, signal.SIGCONT)
    assert agent.words.readline() == "Ready\n"
    for pid in agent.pids:
        wait_gone(pid)
    assert set(marked(mark)) == {agent.process.pid}
    agent.end()
