"""When the driver has nodes try to reach each other, and what it makes of their answers."""

from __future__ import annotations

import time

import pytest
from msgspec import msgpack

from raylaunch.capabilities.peers.agent import PeerGoal, PeerStatus
from raylaunch.capabilities.peers.driver import FORM_SECONDS, PeerCheck
from raylaunch.cluster.capability import Capability
from raylaunch.cluster.driver.driver import Driver
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    NodeJoined,
    PeersUnreachable,
    Progressed,
    WorkersExited,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.record.journal import replay
from raylaunch.node.protocol.node_goal import CapabilitySection, DumpStacks
from raylaunch.node.protocol.node_status import StacksDumped
from raylaunch.worker.heartbeats.heartbeat_writer import NodeCommits
from raylaunch.worker.runtime import files_wait
from tests.fakes import FakeFleet, RunRecorder, driver_port, worker_exit

RESET = WorkerError(type="RuntimeError", message="Connection reset by peer", traceback="")
REDUCE = 'Current thread 0x7f (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 1 in all_reduce\n'
IMPORT = 'Current thread 0x7f (most recent call first):\n  File "/job/train.py", line 1 in <module>\n'


def lose_peer(fleet: FakeFleet, *nodes: str, attempt: int = 1) -> None:
    """Have a worker of each of these nodes fail as those do that lost a peer."""
    for node in nodes:
        rank = fleet.names.index(node) * fleet.nproc
        failure = worker_exit(attempt, rank, exit_code=1, error=RESET)
        fleet.report(node, fleet.failed(node, failure))


def run_driver(fleet: FakeFleet, **job):
    recorder = RunRecorder()
    asked, peers = Job(entrypoint=Entrypoint(script="train.py"), **job), Capability(name="peers", driver=PeerCheck)
    driver = Driver(asked, "run", fleet, recorder, recorder, time.monotonic(), capabilities=(peers,))
    finish = driver.run()
    events = [entry.event for entry in recorder.entries if entry.event is not None]
    assert replay(driver.machine.job, events) == recorder.entries
    return driver, finish, events


def test_the_last_failure_waits_for_the_check_that_explains_it():
    """No restart is left, so the run would end. Failures of both sides come."""
    fleet = FakeFleet(3)
    fleet.unreachable = {"node-2": ("node-3",)}
    fleet.on_launched[1] = lambda: lose_peer(fleet, "node-2", "node-3")
    driver, finish, events = run_driver(fleet, nnodes="2:3", max_restarts=0)
    assert finish.exit_code == 0
    assert driver.machine.roster == ("node-1", "node-2")
    (found,) = [event for event in events if isinstance(event, PeersUnreachable)]
    assert [(peer.node, peer.peer, peer.why) for peer in found.peers] == [("node-2", "node-3", "timed out")]
    assert ("cordon", "id-node-3") in fleet.sent


def test_the_last_failure_ends_the_run_if_all_nodes_reach_each_other():
    fleet = FakeFleet(3)
    fleet.on_launched[1] = lambda: lose_peer(fleet, "node-2", "node-3")
    _, finish, events = run_driver(fleet, nnodes="2:3", max_restarts=0)
    assert finish.exit_code == 1
    assert fleet.sent.count(("listen", "node-1")) == 1
    (failed, *_) = [event for event in events if isinstance(event, WorkersExited)]
    assert failed.failures[0].rank == 2


def test_a_failure_that_is_no_sign_of_the_network_is_not_held():
    fleet = FakeFleet(2)
    fleet.on_launched[1] = lambda: fleet.fail(1)
    _, finish, _ = run_driver(fleet, nnodes=2, max_restarts=0)
    assert finish.exit_code == 1
    assert [order for order in fleet.sent if order[0] == "listen"] == []


def test_nodes_that_do_not_answer_are_no_reason_to_wait_long(monkeypatch):
    """The driver does not reach them, so they will be lost; nor do other nodes reach them, which says nothing new."""
    monkeypatch.setattr("raylaunch.capabilities.peers.driver._ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("raylaunch.capabilities.peers.driver.PROBE_SECONDS", 0.01)

    def answers(node: str, order: CapabilitySection) -> bool:
        return node != "node-3" or msgpack.decode(order.body, type=PeerGoal).peers is None

    fleet = FakeFleet(3)
    fleet.unreachable = {"node-1": ("node-3",), "node-2": ("node-3",)}
    fleet.overrides[CapabilitySection] = lambda node, order: fleet.obey(node, order) if answers(node, order) else None
    fleet.on_launched[1] = lambda: lose_peer(fleet, "node-1")
    _, finish, _ = run_driver(fleet, nnodes="2:3", max_restarts=0)
    assert finish.exit_code == 1
    fleet = FakeFleet(2)
    fleet.overrides[CapabilitySection] = lambda *_: None
    fleet.on_launched[1] = lambda: lose_peer(fleet, "node-1")
    assert run_driver(fleet, nnodes=2, max_restarts=0)[1].exit_code == 1


def test_an_attempt_is_checked_though_the_one_before_made_steps(monkeypatch):
    """Its last steps become known only when it has failed."""
    monkeypatch.setattr("raylaunch.capabilities.peers.driver.FORM_SECONDS", 0.01)
    fleet = FakeFleet(2)

    def step_and_fail() -> None:
        for node, ranks in (("node-1", (0, 1)), ("node-2", (2, 3))):
            marks = tuple(WorkerProgress(rank=rank, marks=5, age=0.0) for rank in ranks)
            fleet.report(node, heartbeat=Heartbeat(attempt=1, marks=marks))
        fleet.fail(1)

    fleet.on_launched = {1: step_and_fail, 2: lambda: None}
    fleet.overrides[CapabilitySection] = lambda *_: fleet.finish()
    assert run_driver(fleet, nnodes=2, max_restarts=1)[1].exit_code == 0


def progressed(marks: int) -> Progressed:
    return Progressed(at=11.0, attempt=1, marks=marks, low=0, high=0, marked=11.0)


class Checked:
    """A check of a run on these nodes, whose time a test sets."""

    def __init__(self, *hosts: str, max_restarts: int = 3, answer: bool = True) -> None:
        self.machine = Machine(
            Job(entrypoint=Entrypoint(script="train.py"), nnodes=f"1:{len(hosts)}", max_restarts=max_restarts)
        )
        self.machine.start()
        self.fleet = FakeFleet(0)
        self.check = PeerCheck(driver_port(machine=self.machine, send=self.sample, show=self.show))
        self.shown: list[tuple[str, PeerGoal]] = []
        self.stacks: dict[str, str] = {}
        self.unreachable: dict[str, tuple[str, ...]] = {}
        self.answers = answer
        for index, host in enumerate(hosts):
            self.machine.handle(NodeJoined(at=0.0, node=f"node-{index}", address=f"10.0.0.{index}", nproc=1, host=host))
        for node in self.machine.roster:
            self.machine.handle(WorkersStarted(at=0.0, attempt=1, node=node))
        self.check.launched(0.0)

    def show(self, node: str, section: bytes) -> None:
        goal = msgpack.decode(section, type=PeerGoal)
        self.shown.append((node, goal))
        if self.answers:
            self.answer(node, goal)

    def answer(self, node: str, goal: PeerGoal) -> None:
        lost = [peer.node for peer in goal.peers or () if peer.node in self.unreachable.get(node, ())]
        unreachable = None if goal.peers is None else tuple((peer, "no") for peer in lost)
        self.check.told(node, msgpack.encode(PeerStatus(check=goal.check, port=1, token="0", unreachable=unreachable)))

    def sample(self, node: str, order: DumpStacks) -> None:
        rank = self.machine.roster.index(node)
        stack = Stack(rank=rank, state="S", text=self.stacks.get(node, REDUCE))
        self.check.stacks(StacksDumped(node=node, attempt=order.attempt, stacks=(stack,)))

    @property
    def listening(self) -> list[tuple[str, PeerGoal]]:
        return [(node, goal) for node, goal in self.shown if goal.peers is None]

    @property
    def connecting(self) -> list[tuple[str, PeerGoal]]:
        return [(node, goal) for node, goal in self.shown if goal.peers is not None]

    def events(self, until: float) -> list[object]:
        """Return what the check yields up to this time."""
        found, now = [], 0.0
        while (now := max(now, self.check.next_check)) <= until:
            found += self.check.due_events(now)
        return found


def test_an_attempt_that_makes_no_step_is_checked():
    """At longer and longer intervals; and no more when it has made two. Some ranks make one before they wait."""
    run = Checked("a", "b")
    assert run.events(FORM_SECONDS - 0.1) == []
    assert run.shown == []
    assert run.events(8 * FORM_SECONDS) == []
    assert len(run.listening) == 2 * 4
    run.machine.handle(progressed(1))
    assert run.check.next_check < float("inf")
    run.machine.handle(progressed(2))
    assert run.events(100 * FORM_SECONDS) == []
    assert len(run.listening) == 2 * 4


def test_hosts_that_are_apart_are_reported_if_all_workers_wait():
    run = Checked("a", "b", "c")
    run.unreachable = {"node-1": ("node-2",), "node-2": ("node-1",)}
    run.stacks["node-0"] = IMPORT
    assert run.events(2 * FORM_SECONDS - 0.1) == [], "one is busy with something else"
    run.stacks.clear()
    (found,) = run.events(2 * FORM_SECONDS)
    assert (found.attempt, [(peer.node, peer.peer) for peer in found.peers]) == (
        1,
        [("node-1", "node-2"), ("node-2", "node-1")],
    )


@pytest.mark.parametrize("function", [NodeCommits.commit_to_restore, files_wait.wait])
def test_a_worker_for_which_its_agent_gets_something_from_another_host_waits(function):
    """It may be for ever: the agent tries again and again, and the worker shows that it is alive."""
    run = Checked("a", "b")
    run.unreachable = {"node-1": ("node-0",)}
    code = function.__code__
    frame = f'  File "{code.co_filename}", line {code.co_firstlineno} in {code.co_name}\n'
    run.stacks["node-1"] = f"Current thread 0x7f (most recent call first):\n{frame}"
    assert [type(event) for event in run.events(2 * FORM_SECONDS - 0.1)] == [PeersUnreachable]


def test_a_step_during_the_check_ends_it():
    run = Checked("a", "b", answer=False)
    run.unreachable = {"node-0": ("node-1",), "node-1": ("node-0",)}
    assert run.events(FORM_SECONDS) == []
    assert len(run.shown) == 2
    for node, order in run.listening:
        run.answer(node, order)
    run.answers = True
    run.machine.handle(progressed(2))
    assert run.events(100 * FORM_SECONDS) == []
    assert len(run.connecting) == 2


def test_one_node_of_each_host_takes_part():
    """And none where all are on one host."""
    run = Checked("a", "a", "b", "b")
    run.events(FORM_SECONDS)
    assert [node for node, _ in run.connecting] == ["node-2", "node-0"]
    assert [len(order.peers) for _, order in run.connecting] == [1, 1]
    alone = Checked("a", "a")
    assert alone.check.next_check == float("inf")
    assert Checked("", "").check.next_check == float("inf")


def test_of_many_nodes_each_connects_to_some():
    run = Checked(*(f"host-{number}" for number in range(80)))
    run.events(FORM_SECONDS)
    assert {len(order.peers) for _, order in run.connecting} == {64}
    assert all(node not in {peer.node for peer in order.peers} for node, order in run.connecting)


def test_answers_to_an_earlier_check_do_not_count():
    run = Checked("a", "b", answer=False)
    run.events(FORM_SECONDS)
    for status in (
        PeerStatus(check=0, port=1, token="0"),
        PeerStatus(check=1),
        PeerStatus(check=1, port=1, token="0"),
        PeerStatus(check=1, unreachable=()),
    ):
        run.check.told("node-0", msgpack.encode(status))
    run.check.stacks(StacksDumped(node="node-0", attempt=1, stacks=()))
    run.events(FORM_SECONDS + 30)
    assert run.connecting == []


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_failure_while_a_check_is_under_way(node):
    """It needs no further one, and no stacks, since workers that are gone have none."""
    run = Checked("a", "b", answer=False)
    run.events(FORM_SECONDS)
    failure = worker_exit(1, 0, exit_code=1, error=RESET)
    events = [WorkersExited(at=11.0, attempt=1, node=node, failures=(core_failure(node, failure),))]
    assert not run.check.holds(events[0], 11.0)
    for each in ("node-0", "node-1"):
        run.check.told(each, msgpack.encode(PeerStatus(check=1, port=1, token="0")))
    assert list(run.check.due_events(11.0)) == []
    for each, other in (("node-0", "node-1"), ("node-1", "node-0")):
        run.check.told(each, msgpack.encode(PeerStatus(check=1, unreachable=((other, "no"),))))
    assert [type(event) for event in run.check.due_events(12.0)] == [PeersUnreachable]


def core_failure(node, failure):
    return Failure(
        attempt=1, node=node, rank=failure.rank, local_rank=0, pid=1, at=0.0, exit_code=1, error=failure.error
    )
