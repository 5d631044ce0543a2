"""A driver that takes over decides as one that never died: without Ray, at every point of a run."""

# ruff: noqa: SLF001 - the driver is stepped from outside, which only its own loop does

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import msgpack

from raylaunch.capabilities.hangs.driver import HangWatch
from raylaunch.capabilities.peers.driver import PeerCheck
from raylaunch.capabilities.state.driver import HeldState
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.capability import Capability
from raylaunch.cluster.driver import driver as drivers
from raylaunch.cluster.driver.driver import Driver, LoopCall, RunClock
from raylaunch.cluster.driver.ledger import LastDriver, Ledger, RunFacts, load
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.driver.succession import FencedLeadership
from raylaunch.cluster.fleet_api import AgentAdopted, AgentLost, AgentsAdopted, HostDraining, ReportReceived
from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.machine.events_and_actions import DriverReplaced, ResizeRequested, RestartRequested, StopRequested
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.machine.state import Phase, Saving
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import NO_NODE, NodeTime, RunTime
from raylaunch.core.placement.plan import make_plan
from raylaunch.node.protocol.node_goal import (
    CapabilitySection,
    CommitCheckpoint,
    DumpStacks,
    LaunchWorkers,
    NodeGoal,
    NodeGoals,
    ProposeCheckpoint,
    StopWorkers,
)
from raylaunch.node.protocol.node_status import AgentReady, StacksDumped
from tests.fakes import READY, FakeFleet, RunRecorder, worker_exit
from tests.profiles import examples

CAPABILITIES = (Capability(name="peers", driver=PeerCheck), Capability(name="hangs", driver=HangWatch))


class KeptFleet(FakeFleet):
    """Knows what its nodes were told. It keeps the ledger itself, and its agents are itself."""

    has_unsent = False
    here = "id-node-1"

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.goals = NodeGoals()
        self.fleet = self.agents = self
        self.head = SimpleNamespace(answered_at=0.0)
        #: What its agents tell a driver that takes over.
        self.told: list[Any] = []

    def reported(self, node, number) -> None:
        pass

    def flush(self, ledger: bytes) -> None:
        pass

    @contextlib.contextmanager
    def allocator(self):
        yield None

    def send(self, node, order) -> None:
        self.goals.add(node, order)
        super().send(node, order)

    def adopted(self) -> list[AgentAdopted | AgentsAdopted]:
        """What a driver that takes over now hears first."""
        agents = [
            AgentAdopted(
                node=node,
                goal=self.goals.of(node),
                report=AgentReport(sent_at=NodeTime(0.0), status=status),
                at=time.monotonic(),
            )
            for node, status in self.statuses.items()
        ]
        return [*agents, AgentsAdopted()]


class MuteFleet(KeptFleet):
    """Starts nothing and answers nothing, but notes the orders."""

    def __init__(self) -> None:
        super().__init__(0)
        self.orders: list[tuple[str, object]] = []

    def start(self, tell) -> None:
        for item in self.told:
            tell(item)

    def send(self, node, order) -> None:
        self.goals.add(node, order)
        self.orders.append((node, order))

    def release(self, node, **_) -> None:
        self.orders.append((node, "release"))

    def replace(self, gone) -> None:
        self.orders.append((gone.node, "replace"))


def driver(fleet, job: Job, ledger=None, kind: type[Driver] = Driver, *, gone: bool = True) -> Any:
    facts = RunFacts(
        request=b"", asked=job, job=job, plan=make_plan(job, (), local=False), run_id="run", began="", spec=None
    )
    recorder = RunRecorder()
    folder = RunFolder(None, None, None, print)
    folder.open(job, "", facts.plan, "", 0.0)
    folder.append = recorder.append
    last = None
    if ledger:
        seconds = {"process_seconds": 1.0, "state_seconds": 0.1, "found_at": time.monotonic()}
        last = LastDriver(ledger=ledger, driver=2, is_gone=gone, **seconds)
    place = SimpleNamespace(predecessor=last, is_in_command=lambda: True, on_command=lambda _: None)
    leadership = FencedLeadership(facts, fleet, folder, place)
    found = kind(
        job, "run", fleet, recorder, recorder, time.monotonic(), leadership=leadership, capabilities=CAPABILITIES
    )
    found.entries, found.folder = recorder.entries, folder
    return found


def written(found: Any) -> Ledger:
    """Return the ledger that a driver would write now."""
    return load(found._leadership.dumped(found.decisions(), found._clock.now()))


def sends(found: Any) -> None:
    """Have a driver send its orders, as at the end of each batch."""
    found._leadership.stepped(found.decisions, found._clock.now())


def feed(found: Driver, items) -> None:
    for item in items:
        for event in found._events(item):
            found._step(event)
        sends(found)


class SimulatedClock(RunClock):
    """It is set by the test."""

    seconds = 0.0

    def now(self) -> RunTime:
        return RunTime(self.seconds)


class SimulatedDriver(Driver):
    """Its clock is set by the test."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._clock = SimulatedClock(self._clock.began)

    @property
    def clock(self) -> float:
        return self._clock.seconds

    @clock.setter
    def clock(self, seconds: float) -> None:
        self._clock.seconds = seconds

    def due_at(self) -> float:
        """When it would look at the time again by itself."""
        parts = (part.next_check for part in self.parts.values())
        return min(self._executor.wake_at, *parts, self.monitor.next_check)

    def hear(self, at: float, heard: Any) -> None:
        """Deal with one thing at that time. A function makes an event of a person; None: only time has passed."""
        self.clock = max(self.clock, at)
        item = LoopCall(heard, Future()) if callable(heard) else heard
        for event in [] if item is None else self._events(item):
            self._step(event)
        for event in self._due_events():
            self._step(event)


class CourseFleet(MuteFleet):
    """Nodes that obey, but whose reports wait until the course has the driver hear them."""

    def __init__(self) -> None:
        super().__init__()
        self.on_launched = dict.fromkeys(range(100), lambda: None)
        #: By node, the attempt that runs there.
        self.running: dict[str, int] = {}
        #: Nodes of whose goals the last ones were not sent.
        self.unreached: set[str] = set()
        self.unheard: deque[Any] = deque()
        self.tell = self.unheard.append

    def join_on(self, host: str) -> None:
        """One more node, of which a host may have several."""
        self.names.append(f"node-{len(self.names) + 1}")
        self.report(self.names[-1], AgentReady(host=host, address=f"of {host}", nproc=2, ready=READY))

    def lose_peers(self, rank: int) -> None:
        """A worker fails since it has lost the connection to another one, whose node cannot be reached."""
        part = next(part for part in self._parts.values() if rank in part.ranks)
        self.unreachable[part.node] = tuple(node for node in self._parts if node != part.node)
        error = WorkerError(type="RuntimeError", message="Connection reset by peer", traceback="")
        failure = worker_exit(part.attempt, rank, rank - part.base_rank, exit_code=1, error=error)
        self.report(part.node, self.failed(part.node, failure))

    def send(self, node, order) -> None:
        if node not in self.unreached:
            super().send(node, order)
            self.obey(node, order)

    def obey(self, node, order) -> None:
        match order:
            case LaunchWorkers():
                self.running[node] = order.attempt
            case StopWorkers() if self.running.get(node) == order.attempt:
                self.running[node] = 0
        super().obey(node, order)

    def lose(self, node) -> None:
        self._end(node)
        super().lose(node)

    def release(self, node, **more) -> None:
        self._end(node)
        super().release(node, **more)

    def _end(self, node) -> None:
        self.running.pop(node, None)
        self.statuses.pop(node, None)

    def cordon(self, host) -> None:
        self.orders.append((host, "cordon"))

    def uncordon(self, host) -> None:
        self.orders.append((host, "uncordon"))

    def scale(self, nodes) -> None:
        self.orders.append((NO_NODE, f"scale to {nodes}"))


class DeafFleet(CourseFleet):
    """The same, but what its nodes would say is not heard: the course has it."""

    def obey(self, node, order) -> None:
        pass


HANG_TIMEOUT = 10.0
_MOST = 7
"""A choice is at most this."""
Heard = tuple[float, Any]
"""A time, and what the driver hears then; see `SimulatedDriver.hear`."""


def nodes_do(fleet: CourseFleet, what: str, choice: int) -> None:
    """Have something happen to the nodes, of which the driver hears later."""
    parts = [*fleet._parts.values()]
    if what == "join":
        fleet.join_on(f"host-{choice % 4}")
    if not parts:
        return
    part = parts[choice % len(parts)]
    match what:
        case "fail":
            fleet.fail(part.base_rank)
        case "lose peers":
            fleet.lose_peers(part.base_rank)
        case "beat":
            marks = [WorkerProgress(rank=rank, marks=choice, age=0.0, step=choice) for rank in part.ranks]
            fleet.report(part.node, heartbeat=Heartbeat(attempt=part.attempt, marks=tuple(marks)))
        case "stall":
            marks = [WorkerProgress(rank=rank, marks=_MOST, age=3 * HANG_TIMEOUT, step=_MOST) for rank in part.ranks]
            fleet.report(part.node, heartbeat=Heartbeat(attempt=part.attempt, marks=tuple(marks)))
        case "finish":
            fleet.finish()
        case "lose":
            fleet.lose(part.node)


def people_do(found: SimulatedDriver, what: str, choice: int, now: float) -> Heard | None:
    """Return what the driver hears of what people do, or the cluster; or None."""
    nodes = sorted(found.machine.nodes)
    match what:
        case "drain" if nodes:
            host, deadline = (
                found.machine.nodes[nodes[choice % len(nodes)]].host,
                found._clock.began + now + 10 * choice,
            )
            return now, HostDraining(host=host, deadline=deadline, why="it is being drained")
        case "tick" if found.due_at() < math.inf:
            return max(now, found.due_at()), None
        case "restart":
            return now, lambda at: [RestartRequested(at=at, by="ada", save_seconds=5.0 * (choice % 2))]
        case "resize":
            return now, lambda at: [ResizeRequested(at=at, by="ada", min_nodes=1, max_nodes=1 + choice % 3)]
        case "stop":
            return now, lambda at: [StopRequested(at=at, signal="SIGTERM", by="ada", save_seconds=5.0 * (choice % 2))]
    return None


def heard_in(found: SimulatedDriver, fleet: CourseFleet, course: Course) -> Iterator[Heard]:
    """Yield what the driver hears in a course, which depends on what it has ordered."""
    for what, choice, pause, reports in [*BEGINNING, *course]:
        now = found.clock + pause
        nodes_do(fleet, what, choice)
        if (heard := people_do(found, what, choice, now)) is not None:
            yield heard
        for _ in range(min(reports, len(fleet.unheard))):
            yield now, fleet.unheard.popleft()


Course = list[tuple[str, int, float, int]]
"""What happens, to whom, after how many seconds, and how many reports the driver hears then."""
BEGINNING = [("join", 0, 0.0, 9), ("join", 1, 0.0, 9), ("tick", 0, 0.0, 9), ("beat", 3, 1.0, 9)]
MOVES = ("join", "tick", "beat", "fail", "stall", "lose peers", "lose", "drain", "restart", "resize", "finish", "stop")
moves = st.sampled_from([what for number, what in enumerate(MOVES) for _ in range(len(MOVES) - number)])
pauses = st.sampled_from((0.0, 0.1, 3.0))


@pytest.fixture(scope="module", autouse=True)
def memory_is_not_released():
    """This process starts a thousand drivers, and to look for what it could release takes 15 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers.processes, "release_memory", lambda: None)
        yield


courses = st.lists(st.tuples(moves, st.integers(0, _MOST), pauses, st.integers(0, 9)), min_size=6, max_size=24)


JOB = Job(
    entrypoint=Entrypoint(script="train.py"),
    nnodes="1:3",
    max_restarts=2,
    last_call=0.5,
    join_timeout=20.0,
    hang_timeout=HANG_TIMEOUT,
    node_timeout=1e6,  # by the clock of this machine, which is not simulated
)


@examples(40)
@given(course=courses)
def test_in_any_course_a_driver_that_takes_over_at_any_entry_goes_on_as_the_last_one_would(course):
    """A driver hears whatever a run may bring. When it has heard all that nodes have told, another one begins.

    It reaches the same world, in the same phase, and tells the nodes nothing but to end what runs no more.
    """
    fleet = CourseFleet()
    whole: SimulatedDriver = driver(fleet, JOB, kind=SimulatedDriver)
    whole._begin()
    for each in heard_in(whole, fleet, course):
        if whole.machine.phase is Phase.DONE:
            break
        whole.hear(*each)
        if fleet.unheard or whole.machine.phase is Phase.DONE:
            continue
        deaf = DeafFleet()
        after = takes_over(whole, deaf, fleet.adopted())
        assert [type(entry.event) for entry in after.entries] == [DriverReplaced]
        assert all(isinstance(order, StopWorkers) for _, order in deaf.orders)
        assert after.machine.state == whole.machine.state
        assert after.machine.world == whole.machine.world
        assert after.machine.restarts == whole.machine.restarts


def takes_over(
    before: SimulatedDriver, fleet: CourseFleet, told: list[Any], ledger: Ledger | None = None
) -> SimulatedDriver:
    """Return a driver that goes on with the ledger of another one, and with what the nodes have told it."""
    after: SimulatedDriver = driver(fleet, JOB, ledger or written(before), kind=SimulatedDriver)
    after._clock.began, after.clock = before._clock.began, before.clock
    there = {item.node for item in told if isinstance(item, AgentAdopted)}
    gone = [AgentLost(node=node, why="its agent died") for node in after.machine.nodes if node not in there]
    fleet.told = [*gone, *told]
    after._begin()
    return after


@examples(60)
@given(course=courses, unreached=st.lists(st.sets(st.integers(0, 3)), min_size=30, max_size=30))
@example(course=[("restart", 1, 0.0, 0)], unreached=[{0}, *[set()] * 4])  # no ledger has that all were told to end
def test_drivers_that_die_before_they_have_told_all_nodes(course, unreached):
    """There are never two worlds, no restart is spent twice, and the run comes to its end.

    After each thing that a driver heard, it dies before it has told some nodes what follows, and another one goes on.
    If all agents that had the ledger die too, the other nodes have been told what is in no ledger (`node-0`).
    """
    fleet, failed = CourseFleet(), set[int]()
    present: SimulatedDriver = driver(fleet, JOB, kind=SimulatedDriver)
    present._begin()
    for what, choice, pause, reports in [*BEGINNING, *course]:
        now = present.clock + pause
        if what in ("fail", "stall", "lose peers"):
            failed.add(present.machine.attempt)
        nodes_do(fleet, what, choice)
        things = [(now, fleet.unheard.popleft()) for _ in range(min(reports, len(fleet.unheard)))]
        if (heard := people_do(present, what, choice, now)) is not None:
            things.insert(0, heard)
        for thing in things:
            if present.machine.phase is Phase.DONE:
                return
            names = unreached.pop() if unreached else set()
            fleet.unreached = {f"node-{number}" for number in names}
            ledger = written(present) if 0 in names else None
            present.hear(*thing)
            fleet.unreached = set()
            if names and present.machine.phase is not Phase.DONE:
                fleet.unheard = deque(item for item in fleet.unheard if not isinstance(item, ReportReceived))
                present = takes_over(present, fleet, fleet.adopted(), ledger)
                assert present.machine.restarts <= len(failed)
                assert len({attempt for attempt in fleet.running.values() if attempt} - {present.machine.attempt}) <= 1
    settles(present, fleet)
    assert present.machine.restarts <= len(failed)


def settles(found: SimulatedDriver, fleet: CourseFleet) -> None:
    """Let nodes say all that they have to say, and time pass, until the world runs or the run is over."""
    for _ in range(200):
        if found.machine.phase is Phase.DONE:
            break
        if fleet.unheard:
            found.hear(found.clock, fleet.unheard.popleft())
        elif found.machine.phase is Phase.RUNNING or found.due_at() == math.inf:
            break
        else:
            found.hear(max(found.clock, found.due_at()), None)
    assert not fleet.unheard or found.machine.phase is Phase.DONE
    if found.machine.phase is Phase.RUNNING:
        roster = {*found.machine.roster}
        assert {node for node, attempt in fleet.running.items() if attempt} <= roster
        assert {fleet.running.get(node, found.machine.attempt) for node in roster} == {found.machine.attempt}


# What only some nodes were told.


def on_two_nodes() -> tuple[SimulatedDriver, CourseFleet]:
    """Return a driver whose world runs on two nodes, and their fleet."""
    fleet = CourseFleet()
    found: SimulatedDriver = driver(fleet, JOB, kind=SimulatedDriver)
    found._begin()
    for host in range(2):
        fleet.join_on(f"host-{host}")
    settles(found, fleet)
    return found, fleet


def told_in_part(
    *missing: type, what: Callable[[SimulatedDriver, CourseFleet], None] = lambda *_: None, nodes: Sequence[int] = (1,)
):
    """Return the orders of a driver that takes over a run on two nodes. `missing`: what some were not told."""
    before, fleet = on_two_nodes()
    deaf = DeafFleet()
    what(before, fleet)
    told = fleet.adopted()
    lost = [order for order in told[1].goal.since(0) if isinstance(order, missing)]
    for index in nodes:
        goal = NodeGoal()
        for order in told[index].goal.since(0):
            goal = goal if isinstance(order, missing) else goal.after(order)
        told[index] = replace(told[index], goal=goal)
    after = takes_over(before, deaf, told)
    assert (after.machine.attempt, after.machine.restarts) == (before.machine.attempt, before.machine.restarts)
    return deaf.orders, lost


def test_a_launch_of_which_one_node_was_not_told():
    """It gets the order that was lost."""
    orders, lost = told_in_part(LaunchWorkers)
    assert [(node, order) for node, order in orders if isinstance(order, LaunchWorkers)] == [("node-2", *lost)]


def test_a_node_that_was_not_told_of_the_attempt_is_first_shown_to_whom_it_copies(monkeypatch):
    """The driver that takes over knows where nodes take copies from what they tell."""

    def serve(_before, fleet) -> None:
        for number, node in enumerate(fleet.names):
            status = StateStatus(at=CopyAddress(node=node, host="h", port=number + 1))
            section = CapabilitySection(capability="state", body=msgpack.encode(status))
            fleet.statuses[node] = fleet.statuses[node].after(section)

    monkeypatch.setitem(globals(), "CAPABILITIES", [Capability(name="state", driver=HeldState)])
    orders, (lost,) = told_in_part(LaunchWorkers, what=serve)
    shown, launched = [order for node, order in orders if node == "node-2"][:2]
    assert msgpack.decode(shown.body, type=StateGoal).copies_to == CopyAddress(node="node-1", host="h", port=1)
    assert launched == lost


def test_a_launch_of_which_no_node_was_told():
    """All get it."""
    orders, (lost,) = told_in_part(LaunchWorkers, nodes=(0, 1))
    launches = [(node, order) for node, order in orders if isinstance(order, LaunchWorkers)]
    assert ([node for node, _ in launches], launches[1][1]) == (["node-1", "node-2"], lost)


def test_a_checkpoint_of_which_no_node_was_told():
    """A step is proposed to all."""
    orders, _ = told_in_part(ProposeCheckpoint, CommitCheckpoint, what=saves, nodes=(0, 1))
    assert [(node, type(order)) for node, order in orders[:2]] == [(f"node-{n}", ProposeCheckpoint) for n in (1, 2)]


def test_a_stop_of_which_one_node_was_not_told():
    """It is told to stop; what is left of the grace is less."""

    def stops(found: SimulatedDriver, fleet: CourseFleet) -> None:
        found.hear(found.clock, lambda at: [StopRequested(at=at, signal="SIGINT", by="ada")])
        assert found.machine.phase is Phase.STOPPING
        found.clock += 1.0

    orders, (lost,) = told_in_part(StopWorkers, what=stops)
    assert orders == [("node-2", replace(lost, grace=lost.grace))]
    assert lost.signal == "SIGINT"


def saves(found: SimulatedDriver, fleet: CourseFleet) -> None:
    """Ask all to save. Both nodes have answered the proposal, and wait."""
    obey = fleet.obey
    fleet.obey = lambda node, order: None if isinstance(order, CommitCheckpoint) else obey(node, order)
    found.hear(found.clock, lambda at: [RestartRequested(at=at, by="ada", save_seconds=5.0)])
    while fleet.unheard:
        found.hear(found.clock, fleet.unheard.popleft())
    assert found.machine.phase is Phase.SAVING


def test_a_step_of_which_one_node_was_not_told_that_all_save_there():
    orders, lost = told_in_part(CommitCheckpoint, what=saves)
    assert orders == [("node-2", *lost)]


def test_a_step_that_was_proposed_to_one_node_only():
    """The other one is told, and all save there when it has answered."""
    orders, (_, lost) = told_in_part(ProposeCheckpoint, CommitCheckpoint, what=saves)
    assert orders[0] == ("node-2", ProposeCheckpoint(attempt=1, step=lost.step, expected=False))
    assert orders[1:] == [("node-2", lost)]


def test_a_node_that_answers_late_was_told_to_end_which_is_in_no_ledger():
    """It counts as lost."""
    before, fleet = on_two_nodes()
    deaf = DeafFleet()
    ledger = written(before)
    fleet.send("node-2", StopWorkers(attempt=1, grace=0.0))
    first, second, last = fleet.adopted()
    after = takes_over(before, deaf, [first, last, second], ledger)
    assert set(after.machine.nodes) == {"node-1", "node-2"}
    after.hear(after.clock, second)
    assert set(after.machine.nodes) == {"node-1"}


GAP_SECONDS = 5.0


def between(nodes: int, *heard: Any, **more: Any) -> tuple[SimulatedDriver, DeafFleet]:
    """Return a driver that has just taken over a run on so many nodes, 5 s after the last one had heard this and died."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:3", last_call=0.0, node_timeout=1e6, **more)
    fleet, deaf = CourseFleet(), DeafFleet()
    before: SimulatedDriver = driver(fleet, job, kind=SimulatedDriver)
    before._begin()
    for host in range(nodes):
        fleet.join_on(f"host-{host}")
    while fleet.unheard:
        before.hear(before.clock, fleet.unheard.popleft())
    assert before.machine.phase is Phase.RUNNING
    for each in heard:
        before.hear(before.clock, each)
    after: SimulatedDriver = driver(deaf, job, written(before), kind=SimulatedDriver)
    deaf.names, deaf._parts, deaf.statuses = fleet.names, fleet._parts, fleet.statuses
    after._clock.began, after.clock = before._clock.began, before.clock + GAP_SECONDS
    deaf.told = fleet.adopted()
    after._begin()
    return after, deaf


def hears(found: SimulatedDriver, fleet: DeafFleet) -> list[object]:
    """Have the driver hear what the nodes have told. Return its orders since then, without their nodes."""
    fleet.orders.clear()
    while fleet.unheard:
        found.hear(found.clock, fleet.unheard.popleft())
    return [order for _, order in fleet.orders]


def test_a_hang_that_began_while_there_was_no_driver():
    """Its seconds are those since the last step, which the agent tells."""
    found, fleet = between(1, hang_timeout=HANG_TIMEOUT, max_restarts=1)
    nodes_do(fleet, "stall", 0)
    assert DumpStacks(attempt=1, in_full=(0, 1)) in hears(found, fleet)
    for node in fleet._parts:
        fleet.report(node, StacksDumped(node=node, attempt=1, stacks=()))
    hears(found, fleet)
    assert (found.machine.attempt, found.machine.restarts) == (2, 1)


def test_a_node_that_joined_while_there_was_no_driver():
    """The workers save, and the next attempt has it."""
    found, fleet = between(1)
    fleet.join_on("host-1")
    assert [*map(type, hears(found, fleet))] == [ProposeCheckpoint]
    assert found.machine.phase is Phase.SAVING


def test_a_node_that_was_lost_while_there_was_no_driver():
    """The next attempt does without it."""
    found, fleet = between(2)
    attempt = found.machine.attempt
    fleet.lose("node-1")
    hears(found, fleet)
    assert (found.machine.attempt, found.machine.roster) == (attempt + 1, ("node-2",))


def test_a_host_that_was_drained_while_there_was_no_driver():
    """The workers save."""
    found, fleet = between(2)
    fleet.tell(HostDraining(host="host-0", deadline=found._clock.began + found.clock + 90.0, why="it is being drained"))
    assert [*map(type, hears(found, fleet))] == [ProposeCheckpoint] * 2
    assert found.machine.phase is Phase.SAVING


@pytest.mark.parametrize("seconds", [8.0, 5.5])
def test_the_time_to_save_came_while_there_was_no_driver(seconds):
    """The workers save at once, in what is left until the deadline, and the run can go on later."""
    found, fleet = between(2, lambda at: [DeadlineSet(at=at, deadline=at + seconds, why="Slurm ends job 7")])
    deadline = found.machine.run.timing.deadline.at
    assert found.due_at() <= found.clock < deadline
    found.hear(found.clock, None)
    assert [type(order) for _, order in fleet.orders] == [ProposeCheckpoint] * 2
    state = found.machine.state
    assert isinstance(state, Saving)
    assert (state.ending.exit_code, found.clock <= state.deadline < deadline) == (75, True)


def test_the_host_of_the_driver_is_drained():
    """It does not end the run."""
    found, fleet = between(1)
    fleet.tell(HostDraining(host="elsewhere", deadline=0.0, why="it is being drained", ours=True))
    hears(found, fleet)
    assert found._observer.lines[-1:] == [
        "the host of the driver is being drained: another driver takes over when it is gone"
    ]
