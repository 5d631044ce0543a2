"""A driver that may be cut off, while another one is in command, launches nothing and writes no result."""

# ruff: noqa: SLF001 - the driver is stepped from outside, which only its own loop does

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.driver import driver as drivers
from raylaunch.cluster.driver import succession
from raylaunch.cluster.driver.ledger import load
from raylaunch.cluster.fleet_api import AgentLost, ReportReceived, SlotGranted
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.node.protocol.node_goal import LaunchWorkers
from tests.cluster.takeover.test_driver_takes_over import CourseFleet, driver, feed, sends, written
from tests.fakes import worker_exit


class LeftError(BaseException):
    """The process of the driver would have ended."""


class Fence:
    def leave(self, why: str) -> None:
        raise LeftError(why)


class OrderlyFleet(CourseFleet):
    """Sends its orders when the driver says so, as that of a detached run does."""

    here = "host-0"

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[str, object]] = []

    @property
    def has_unsent(self) -> bool:
        return bool(self.waiting)

    def send(self, node, order) -> None:
        self.waiting.append((node, order))

    def flush(self, ledger) -> None:
        waiting, self.waiting = self.waiting, []
        for node, order in waiting:
            super().send(node, order)

    def launched(self) -> list[int]:
        """Return the attempts for which a node has had its order."""
        return sorted({order[2] for order in self.sent if order[0] == "launch"})


def heard(found, fleet: OrderlyFleet) -> None:
    """Have the driver deal with all that its agents say, until they say no more."""
    feed(found, [])
    sends(found)
    while fleet.unheard:
        feed(found, [fleet.unheard.popleft()])


def two_nodes():
    """Return a driver whose attempt 1 runs on two hosts, of which it is on the first."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", max_restarts=1, last_call=0.0, join_timeout=20.0)
    fleet = OrderlyFleet()
    found = driver(fleet, job)
    found.folder.fence = Fence()
    found._begin()
    fleet.join_on("host-0")
    fleet.join_on("host-1")
    heard(found, fleet)
    return found, fleet


def test_a_ledger_is_sent_only_when_there_is_something_new():
    """A heartbeat is nothing that another driver needs: agents tell it again."""
    found, fleet = two_nodes()
    ledgers: list[bytes] = []
    fleet.flush = ledgers.append
    found._leadership._saved_at = 0.0  # long ago
    sends(found)
    ledgers.clear()
    found._leadership._saved_at = 0.0
    fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=()))
    heard(found, fleet)
    assert ledgers == []
    fleet.join_on("host-2")
    heard(found, fleet)
    assert load(ledgers[-1]).decisions.run.nodes.keys() == {"node-1", "node-2", "node-3"}


def test_a_slot_of_a_node_that_has_joined_is_not_granted_again():
    """The agent answers a driver that takes over before Ray does. The node would count as one without workers."""
    found, _ = two_nodes()
    known = len(found.entries)
    feed(found, [SlotGranted(node="node-1", host="host-0", address="10.0.0.1")])
    assert found.entries[known:] == []


def silent(node: str) -> AgentLost:
    return AgentLost(node=node, why="nothing was heard of it for 3 s", silent=True)


def lose(found, fleet: OrderlyFleet, gone: AgentLost) -> None:
    for event in found._node_lost(gone):
        found._step(event)
    heard(found, fleet)


def test_a_launch_waits_for_the_head_if_a_node_is_only_silent():
    """Another driver may command it on the other side of a cut. The workers here are stopped at once."""
    found, fleet = two_nodes()
    assert fleet.launched() == [1]
    lose(found, fleet, silent("node-2"))
    assert [order[1] for order in fleet.sent if order[0] == "stop"] == ["node-1"]
    assert found.machine.attempt == 2
    for _ in range(3):
        heard(found, fleet)
    assert fleet.launched() == [1]
    fleet.head.answered_at = time.monotonic()
    heard(found, fleet)
    assert fleet.launched() == [1, 2]


def test_a_launch_waits_for_nobody_if_an_agent_is_dead():
    """Its link has ended: nobody commands it."""
    found, fleet = two_nodes()
    lose(found, fleet, AgentLost(node="node-2", why="its agent died"))
    assert fleet.launched() == [1, 2]


@pytest.mark.parametrize(
    ("answer", "is_silent", "heard_at", "why"),
    [
        (True, True, -math.inf, ""),
        (False, False, math.inf, "another driver has taken over"),
        (None, False, math.inf, ""),
        (None, False, -math.inf, "it reaches neither the head"),
        (None, True, -math.inf, "it reaches neither the head"),
    ],
)
def test_the_end_of_a_run(monkeypatch, answer, is_silent, heard_at, why):
    """A driver ends without a result if it was replaced, or may be. The head may be gone for good, while agents report.

    `answer`: what the head says, None: nothing. `heard_at`: when the agent on the other host has reported last.
    """
    monkeypatch.setattr(succession, "_OTHERS_SECONDS", 0.05)
    found, fleet = two_nodes()
    found._leadership._place.is_in_command = lambda: answer
    if is_silent:
        lose(found, fleet, silent("node-2"))
    monkeypatch.setattr(found.nodes, "last_heard", lambda _: heard_at)
    if why:
        with pytest.raises(LeftError, match=why):
            found._leadership.ended(found.nodes)
    else:
        found._leadership.ended(found.nodes)


def test_a_driver_that_nobody_has_obeyed_writes_no_result(monkeypatch):
    """The head is lost, or this host is cut off, before an agent obeys it."""
    found, agents = taking_over(is_driver_gone=True)
    leadership, told = found._leadership, []
    found.folder.fence = Fence()
    leadership._place.on_command = told.append
    leadership._place.is_in_command = lambda: None
    monkeypatch.setattr(leadership, "_is_cut_off", lambda *_: False)
    with pytest.raises(LeftError, match="reaches neither"):
        leadership.ended(found.nodes)
    leadership.heard(agents[0])
    leadership.ended(found.nodes)
    assert told == [""]


def taking_over(*, is_driver_gone: bool):
    """Return a driver that will take over from one on the first host of two, and what its agents will say."""
    before, fleet = two_nodes()
    return driver(OrderlyFleet(), before.machine.job, written(before), gone=is_driver_gone), fleet.adopted()


def taken_over(*told, is_driver_gone: bool = True):
    """Return a driver that has taken over, after its agents have said this."""
    found, _ = taking_over(is_driver_gone=is_driver_gone)
    found._fleet.told = told
    found._begin()
    return found


def test_nodes_that_obey_have_no_minute_without_a_driver_any_more():
    """So a driver that is cut off right after it has taken over misses them as soon as its successor expects."""
    _, (first, _, end) = taking_over(is_driver_gone=True)
    found = taken_over(end)
    assert found.nodes.last_heard("node-1") > time.monotonic() + 30
    found = taken_over(first, end)
    assert found.nodes.last_heard("node-1") <= time.monotonic()
    assert found.nodes.last_heard("node-2") > time.monotonic() + 30


@pytest.mark.parametrize(("is_driver_gone", "lost"), [(True, {"node-1"}), (False, set())])
def test_a_host_that_ray_counts_as_dead(is_driver_gone, lost):
    """It may be cut off, unless it was that of the last driver, whose process has ended."""
    _, (*_, end) = taking_over(is_driver_gone=is_driver_gone)
    gone = [AgentLost(node=node, why="its host died", is_host_dead=True) for node in ("node-1", "node-2")]
    found = taken_over(*gone, end, is_driver_gone=is_driver_gone)
    assert {node for node in ("node-1", "node-2") if found.nodes.is_lost(node)} == lost


def test_an_agent_that_is_slow_to_answer_holds_nobody_up(monkeypatch):
    """After a while the run goes on with the others. When it answers, it gets the orders that have come meanwhile."""
    monkeypatch.setattr(drivers, "_HEAR_SECONDS", 0.0)
    _, (first, second, _) = taking_over(is_driver_gone=True)
    found = taken_over(first)
    fail(found, first)
    assert found.machine.attempt == 2
    assert found.machine.roster == ("node-1", "node-2")
    goal = second.goal
    for order in found._fleet.goals.of("node-2").since(0):
        goal = goal.after(order)
    feed(found, [replace(second, goal=goal)])
    assert not found.nodes.is_lost("node-2")


def test_an_agent_that_knows_of_an_attempt_that_the_ledger_has_not():
    """The last driver died when only this one had the order. All begin an attempt that nobody has heard of."""
    _, (first, second, end) = taking_over(is_driver_gone=True)
    goal = second.goal
    launches = [order for _, order in goal.orders if isinstance(order, LaunchWorkers)]
    later = replace(launches[-1], assignment=replace(launches[-1].assignment, attempt=2))
    found = taken_over(first, replace(second, goal=goal.after(later)), end)
    assert (found.machine.attempt, found.machine.roster, found.machine.restarts) == (3, ("node-1", "node-2"), 0)


def fail(found, agent) -> None:
    """Let a worker of an agent's node fail, of which the driver hears."""
    failure = worker_exit(1, 0, exit_code=1)
    before = agent.report.status
    status = before.after(replace(before.workers, failures=(failure,)))
    report = AgentReport(sent_at=0.0, status=status)
    feed(found, [ReportReceived(node=agent.node, report=report, at=time.monotonic())])
