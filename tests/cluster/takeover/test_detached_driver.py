"""A driver that takes over decides as one that never died: without Ray, at every point of a run."""

# ruff: noqa: SLF001 - the driver is stepped from outside, which only its own loop does

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cluster.driver.driver import LoopCall
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet_api import AgentsAdopted, HostDraining
from raylaunch.cluster.takeover import detached_driver
from raylaunch.cluster.takeover.detached_driver import DetachedDriver
from raylaunch.cluster.takeover.driver_state import RunFacts, TakeoverFacts, load
from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.history.run_status import StatusBuilder
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import ResizeRequested, RestartRequested, StopRequested
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import NO_NODE, RunTime
from raylaunch.core.placement.plan import make_plan
from raylaunch.node.protocol.messages import DumpStacks, ProcessesExited, ProposeCheckpoint, StacksDumped
from raylaunch.node.protocol.node_status import AgentReady
from tests.fakes import READY, FakeFleet, RunRecorder, process_failure
from tests.profiles import examples


class KeptFleet(FakeFleet):
    """Notes what it tells the driver; each flush takes the driver's state."""

    has_unsent = False
    head_answered_at = 0.0
    here = "id-node-1"

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.items: list[object] = []
        self.heard: set[str] = set()
        self.adopted: set[str] = set()

    def start(self, tell) -> None:
        def noting(item):
            self.items.append(item)
            tell(item)

        super().start(noting)

    def reported(self, node, report) -> None:
        pass

    def flush(self, state: bytes) -> None:
        pass

    def state(self):
        return None

    @contextlib.contextmanager
    def locked(self):
        yield


class MuteFleet(KeptFleet):
    """Starts nothing and answers nothing, but notes the orders."""

    def __init__(self) -> None:
        super().__init__(0)
        self.orders: list[tuple[str, object]] = []

    def start(self, tell) -> None:
        pass

    def send(self, node, order) -> None:
        self.orders.append((node, order))

    def release(self, node, **_) -> None:
        self.orders.append((node, "release"))

    def replace(self, gone) -> None:
        self.orders.append((gone.node, "replace"))


def driver(fleet, job: Job, taken=None, kind: type[DetachedDriver] = DetachedDriver) -> Any:
    facts = RunFacts(
        request=b"", asked=job, job=job, plan=make_plan(job, (), local=False), run_id="run", began="", spec=None
    )
    recorder = RunRecorder()
    folder = RunFolder(None, None, None, print)
    folder._status = StatusBuilder(job)
    recorder.state, recorder.take_command, recorder.where = folder.state, folder.take_command, ""
    takeover = (
        TakeoverFacts(driver=2, process_seconds=1.0, state_seconds=0.1, found_at=time.monotonic()) if taken else None
    )
    found = kind(facts, fleet, recorder, recorder, time.monotonic(), taken=taken, takeover=takeover)
    found.entries = recorder.entries
    return found


def feed(found: DetachedDriver, items) -> None:
    for item in items:
        for event in found._events(item):
            found._step(event)
        found._stepped()


def fails_once(fleet: KeptFleet) -> None:
    fleet.on_launched[1] = lambda: fleet.fail(1)


def loses_a_node(fleet: KeptFleet) -> None:
    fleet.on_launched[1] = lambda: (fleet.lose("node-1"), fleet.join("node-9"))


def is_drained(fleet: KeptFleet) -> None:
    fleet.on_launched[1] = lambda: (fleet.drain("node-2"), fleet.join("node-9"))


@pytest.mark.parametrize("course", [fails_once, loses_a_node, is_drained])
def test_a_driver_that_takes_over_at_any_point_gives_the_same_orders(course):
    """For each prefix of what a driver heard in a run: its successor, which has the state, does what it would do."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="2:3", max_restarts=1, last_call=0.05, join_timeout=2.0)
    fleet = KeptFleet(2)
    course(fleet)
    whole = driver(fleet, job)
    finish = whole.run()
    assert len(fleet.items) > 6
    for cut in range(len(fleet.items)):
        first, second = MuteFleet(), MuteFleet()
        before = driver(first, job)
        before._begin()
        feed(before, fleet.items[:cut])
        after = driver(second, job, load(before.state()))
        after._begin()
        after._began = before._began
        first.orders.clear()
        feed(before, fleet.items[cut:])
        feed(after, fleet.items[cut:])
        assert first.orders == second.orders
        assert before.machine.phase is after.machine.phase
        assert before.machine.world == after.machine.world
    assert finish.exit_code == 0


# The same for any course of a run.


class SimulatedDriver(DetachedDriver):
    """Its clock is set by the test."""

    clock = 0.0

    def _now(self) -> RunTime:
        return RunTime(self.clock)

    def _is_hearing(self) -> bool:
        return False  # the course has all that agents tell

    def due_at(self) -> float:
        """When it would look at the time again by itself."""
        return min(self._executor.wake_at, self._peers.next_check, self.monitor.next_check)

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
        failure = process_failure(part.attempt, rank, rank - part.base_rank, exit_code=1, error=error)
        self.report(part.node, ProcessesExited(attempt=part.attempt, failures=(failure,)))

    def send(self, node, order) -> None:
        super().send(node, order)
        self.obey(node, order)

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
            host, deadline = found.machine.nodes[nodes[choice % len(nodes)]].host, found._began + now + 10 * choice
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
        patch.setattr(detached_driver.processes, "release_memory", lambda: None)
        yield


courses = st.lists(st.tuples(moves, st.integers(0, _MOST), pauses, st.integers(0, 9)), min_size=6, max_size=24)


@examples(40)
@given(course=courses)
def test_in_any_course_a_driver_that_takes_over_at_any_entry_gives_the_same_orders(course):
    """A driver hears whatever a run may bring. After each thing that it heard, another one begins with its state.

    The other one hears the rest, and must order the same, in the same order, and end in the same phase.
    """
    job = Job(
        entrypoint=Entrypoint(script="train.py"),
        nnodes="1:3",
        max_restarts=2,
        last_call=0.5,
        join_timeout=20.0,
        hang_timeout=HANG_TIMEOUT,
        node_timeout=1e6,  # by the clock of this machine, which is not simulated
    )
    fleet = CourseFleet()
    whole: SimulatedDriver = driver(fleet, job, kind=SimulatedDriver)
    whole._begin()
    heard: list[Heard] = []
    #: The state and the time, and how many orders there were until then.
    cuts = [(whole.state(), whole.clock, len(fleet.orders))]
    for each in heard_in(whole, fleet, course):
        if whole.machine.phase is Phase.DONE:
            break
        heard.append(each)
        whole.hear(*each)
        cuts.append((whole.state(), whole.clock, len(fleet.orders)))
    for cut, (state, clock, ordered) in enumerate(cuts):
        deaf = DeafFleet()
        after: SimulatedDriver = driver(deaf, job, load(state), kind=SimulatedDriver)
        after._begin()
        after._began, after.clock = whole._began, clock
        for event in after._events(AgentsAdopted()):
            after._step(event)
        assert [type(entry.event) for entry in after.entries] == [DriverReplaced]
        for at, item in heard[cut:]:
            after.hear(at, item)
        assert deaf.orders == fleet.orders[ordered:]
        assert after.machine.state == whole.machine.state
        assert after.machine.world == whole.machine.world


GAP_SECONDS = 5.0


def between(nodes: int, **more: Any) -> tuple[SimulatedDriver, DeafFleet]:
    """Return a driver that has just taken over a run on so many nodes, 5 s after the last one has died."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:3", last_call=0.0, node_timeout=1e6, **more)
    fleet, deaf = CourseFleet(), DeafFleet()
    before: SimulatedDriver = driver(fleet, job, kind=SimulatedDriver)
    before._begin()
    for host in range(nodes):
        fleet.join_on(f"host-{host}")
    while fleet.unheard:
        before.hear(before.clock, fleet.unheard.popleft())
    assert before.machine.phase is Phase.RUNNING
    after: SimulatedDriver = driver(deaf, job, load(before.state()), kind=SimulatedDriver)
    after._begin()
    deaf.names, deaf._parts = fleet.names, fleet._parts
    after._began, after.clock = before._began, before.clock + GAP_SECONDS
    for event in after._events(AgentsAdopted()):
        after._step(event)
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
    assert DumpStacks(attempt=1) in hears(found, fleet)
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
    """The workers save. A node that comes up there later is left, too, whatever the clock of the next driver's host."""
    found, fleet = between(2)
    fleet.tell(HostDraining(host="host-0", deadline=found._began + found.clock + 90.0, why="it is being drained"))
    assert [*map(type, hears(found, fleet))] == [ProposeCheckpoint] * 2
    assert found.machine.phase is Phase.SAVING
    state = load(found.state())
    elsewhere = driver(MuteFleet(), found.machine.job, replace(state, clock=state.clock - 1000.0))
    (notice,) = elsewhere._draining.values()
    assert notice.deadline == pytest.approx(found._began + found.clock + 1090.0, abs=60.0)


def test_the_host_of_the_driver_is_drained():
    """It does not end the run."""
    found, fleet = between(1)
    fleet.tell(HostDraining(host="elsewhere", deadline=0.0, why="it is being drained", ours=True))
    hears(found, fleet)
    assert found._observer.lines[-1:] == [
        "the host of the driver is being drained: another driver takes over when it is gone"
    ]
