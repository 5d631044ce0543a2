"""Which workers can stay, and what they are told when the next attempt begins."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest

from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.protocol.forkserver_messages import StartWorkers, SurvivorReturned
from raylaunch.node.state.state_files import MemoryFile
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.survivor_table import SurvivorTable
from raylaunch.worker.heartbeats.shared_page import PAGE_VARIABLE
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.survivor_link import Rejoin, SurvivorWord


def specs(attempt: int, terminal: str = "") -> tuple[WorkerSpec, ...]:
    env = {"RANK": "0", "MASTER_PORT": str(attempt)} | ({"FIRST": "1"} if attempt == 1 else {})
    folder = f"/attempt-{attempt}"
    paths = {"stdout": f"{folder}/out", "stderr": f"{folder}/err"}
    more = {"title": f"attempt {attempt}", "terminal": terminal}
    return (WorkerSpec(rank=0, local_rank=0, kind="script", target="", env=env, cwd="/", **more, **paths),)


def state(attempt: int = 1, pids: tuple[int, ...] = (os.getpid(),), ends: tuple[int, ...] = ()) -> AttemptState:
    assignment = assign(attempt, [Member(node="node-0", address="", nproc=1)])[0]
    return AttemptState(assignment, specs(attempt), pids=pids, ends=dict(enumerate(ends)))


class Served:
    """A table, and a worker that is connected to it: this process. `another` is one of the same process id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = SurvivorTable()
        monkeypatch.setenv(survivor_link.ADDRESS_VARIABLE, self.table.address)
        worker = survivor_link.connect()
        assert worker is not None
        self.worker = worker
        self.sent: list[SurvivorReturned] = []
        #: In what each rank may complete commits, and which ranks were said to be dead then.
        self.files: dict[int, MemoryFile] = {}
        self.dead: list[Collection[int]] = []
        self.poll()

    def begin(self, attempt: int, before: AttemptState, terminal: str = "") -> tuple[int, ...]:
        return self.ordered(attempt, before, terminal).survivors

    def ordered(self, attempt: int, before: AttemptState, terminal: str = "") -> StartWorkers:
        """Begin an attempt; return the order for the fork server."""
        start = StartWorkers(attempt=attempt, workers=specs(attempt, terminal))
        return self.table.rejoin(start, before, self._file_to_complete)

    def _file_to_complete(self, _attempt: int, rank: int, dead: Collection[int]) -> tuple[MemoryFile | None, int]:
        self.dead.append(dead)
        return self.files.get(rank), 840 if self.files else 0

    def say(self, word: str, attempt: int, worker: socket.socket | None = None, seconds: int = 0) -> None:
        said = SurvivorWord(word=word, attempt=attempt, seconds=seconds)
        (worker or self.worker).send(survivor_link.encode(said))

    def another(self) -> socket.socket:
        """Connect another worker."""
        worker = survivor_link.connect()
        assert worker is not None
        self.poll()
        return worker

    def poll(self, attempt: int = 1) -> bool:
        return self.table.poll(state(attempt), self.sent.append)

    def told(self) -> Rejoin | None:
        try:
            return Rejoin(**json.loads(self.worker.recv(survivor_link.MESSAGE_BYTES, socket.MSG_DONTWAIT)))
        except BlockingIOError:
            return None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served(monkeypatch)
    yield served
    served.worker.close()
    served.table.close()


@pytest.mark.parametrize(
    ("kind", "has_page", "is_invited"), [("script", True, True), ("command", True, False), ("script", False, False)]
)
def test_who_is_told_where_to_say_that_it_can_stay(served, kind, has_page, is_invited):
    """Neither a command, which is no Python of ours, nor a worker beyond the slots of the shared page."""
    page = {PAGE_VARIABLE: "/page:0"} if has_page else {}
    worker = replace(specs(1)[0], kind=kind, env=page)
    told = {survivor_link.ADDRESS_VARIABLE: served.table.address} if is_invited else {}
    assert served.table.invited(worker) == replace(worker, env=page | told)


def test_all_have_the_time_that_the_slowest_needs_to_return(served):
    """Of those that stay: a worker with NCCL needs longer than others."""
    fast = served.another()
    for seconds, worker in ((10, None), (1, fast)):
        served.say("ready", 1, worker, seconds)
    served.poll()
    assert served.ordered(2, state()).return_seconds == 10
    fast.close()


def test_a_worker_that_is_ready_stays(served):
    """It is told what has changed in its environment, and where its output goes."""
    served.say("ready", 1)
    assert served.poll()
    assert served.begin(2, state()) == (os.getpid(),)
    changed, out, err = {"MASTER_PORT": "2"}, "/attempt-2/out", "/attempt-2/err"
    assert served.told() == Rejoin(attempt=2, env=changed, removed=["FIRST"], title="attempt 2", stdout=out, stderr=err)
    served.say("returned", 2)
    assert not served.poll()
    served.say("completed", 2)
    assert not served.poll()
    pid = os.getpid()
    assert served.sent == [SurvivorReturned(attempt=2, pid=pid), SurvivorReturned(attempt=2, pid=pid, completed=True)]


def test_it_stays_again_though_the_attempt_has_not_begun(served):
    """Another worker has died meanwhile."""
    served.say("ready", 1)
    served.poll()
    served.begin(2, state())
    assert served.begin(3, state(2, pids=())) == (os.getpid(),)


def test_output_to_a_terminal_stays_there(served):
    served.say("ready", 1)
    served.poll()
    served.begin(2, state(), terminal="/dev/pts/7")
    assert served.told() == Rejoin(
        attempt=2, env={"MASTER_PORT": "2"}, removed=["FIRST"], title="attempt 2", stdout="", stderr=""
    )


@pytest.mark.parametrize("before", [state(pids=(1,)), state(ends=(1,))], ids=["not a worker", "it has ended"])
def test_others_do_not_stay(served, before):
    served.say("ready", 1)
    served.poll()
    assert served.begin(2, before) == ()
    assert served.told() is None


def test_a_worker_that_is_not_ready_does_not_stay(served):
    """It prepares itself, or no commit is complete yet; or it says so of another attempt."""
    served.say("ready", 9)
    assert not served.poll()
    assert served.begin(2, state()) == ()


@pytest.mark.parametrize("data", [b"\xff", b"nonsense", b"{}", b'{"word": 1, "attempt": "x"}', b'{"word": "ready"}'])
def test_nonsense_ends_the_connection(served, data):
    served.worker.send(data)
    assert not served.poll()
    assert served.worker.recv(1) == b""


# What a survivor completes.


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    found = MemoryFile.create("run", 0)
    os.ftruncate(found.fd, 12_345)
    yield found
    found.close()


def order_with_file(worker: socket.socket) -> tuple[Rejoin | None, int]:
    """Return what a worker is told, and the inode of the file that it is given; 0: it is given none."""
    worker.settimeout(60)
    order, fd = survivor_link.receive_rejoin(worker)
    found = os.fstat(fd).st_ino if fd >= 0 else 0
    if fd >= 0:
        os.close(fd)
    return order, found


def test_the_first_that_stays_is_given_the_file_to_complete_and_others_none(served, file):
    """The fork server is told how much it writes."""
    served.files[0] = file
    other = served.another()
    for worker in (served.worker, other):
        served.say("ready", 1, worker)
    served.poll()
    order = served.ordered(2, state(ends=()))
    assert (order.attempt, order.survivors, order.to_complete) == (2, (os.getpid(),) * 2, 12_345)
    (first, given), (second, none) = order_with_file(served.worker), order_with_file(other)
    assert given == os.fstat(file.fd).st_ino
    assert (first, none) == (replace(second, newest=840), 0)
    other.close()


def test_the_dead_are_those_of_the_attempt_that_have_ended(served, file):
    served.files[0] = file
    served.say("ready", 1)
    served.poll()
    before = state()
    before.ends[7] = False
    served.ordered(2, before)
    assert [[*dead] for dead in served.dead] == [[7]]


def test_a_worker_that_is_gone_leaves_the_file_to_the_next_one(served, file):
    """It has closed its connection, which is not noticed yet."""
    served.files[0] = file
    other = served.another()
    for worker in (served.worker, other):
        served.say("ready", 1, worker)
    served.poll()
    served.worker.close()
    assert served.ordered(2, state()).survivors == (os.getpid(),)
    assert order_with_file(other)[1]
    other.close()


def test_where_there_is_nothing_to_complete_no_file_is_given(served):
    served.say("ready", 1)
    served.poll()
    assert served.ordered(2, state()).to_complete == 0
    order, given = order_with_file(served.worker)
    assert (order.attempt, given) == (2, 0)
