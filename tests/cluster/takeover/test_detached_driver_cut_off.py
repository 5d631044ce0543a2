"""A driver that may be cut off, while another one is in command, launches nothing and writes no result."""

# ruff: noqa: SLF001 - the driver is stepped from outside, which only its own loop does

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from ray.exceptions import NodeDiedError

from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.fleet_api import AgentLost, ReportReceived
from raylaunch.cluster.takeover import detached_driver
from raylaunch.cluster.takeover.ledger import load
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.node.protocol.messages import LaunchWorkers, ProcessesExited
from tests.cluster.takeover.test_detached_driver import CourseFleet, driver, feed
from tests.fakes import process_failure


class LeftError(BaseException):
    """The process of the driver would have ended."""


class Fence:
    def leave(self, why: str) -> None:
        raise LeftError(why)


class OrderlyFleet(CourseFleet):
    """Sends its orders when the driver says so, as `DetachedFleet` does."""

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
    found._stepped()
    while fleet.unheard:
        feed(found, [fleet.unheard.popleft()])


def two_nodes():
    """Return a driver whose attempt 1 runs on two hosts, of which it is on the first."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", max_restarts=1, last_call=0.0, join_timeout=20.0)
    fleet = OrderlyFleet()
    found = driver(fleet, job)
    found._folder.fence = Fence()
    found._begin()
    fleet.join_on("host-0")
    fleet.join_on("host-1")
    heard(found, fleet)
    return found, fleet


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
    fleet.head_answered_at = time.monotonic()
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
    monkeypatch.setattr(detached_driver, "_OTHERS_SECONDS", 0.05)
    found, fleet = two_nodes()
    found._is_in_command = lambda: answer
    if is_silent:
        lose(found, fleet, silent("node-2"))
    monkeypatch.setattr(found.nodes, "last_heard", lambda _: heard_at)
    monkeypatch.setattr(detached_driver.Driver, "run", lambda _: "the end")
    if why:
        with pytest.raises(LeftError, match=why):
            found.run()
    else:
        assert found.run() == "the end"


def test_a_driver_that_nobody_has_obeyed_writes_no_result(monkeypatch):
    """The head is lost, or this host is cut off, before an agent obeys it."""
    found, agents = taken_over(is_driver_gone=True)
    found._folder.fence, told = Fence(), []
    found._on_command = told.append
    found._is_in_command = lambda: None
    monkeypatch.setattr(found, "_is_cut_off", lambda _: False)
    monkeypatch.setattr(detached_driver.Driver, "run", lambda _: "the end")
    with pytest.raises(LeftError, match="reaches neither"):
        found.run()
    feed(found, agents[:1])
    assert (told, found.run()) == ([""], "the end")


def taken_over(*, is_driver_gone: bool):
    """Return a driver that takes over from one on the first host of two, and what its agents will say."""
    before, fleet = two_nodes()
    found = driver(OrderlyFleet(), before.machine.job, load(before._dumped()), gone=is_driver_gone)
    found._begin()
    return found, fleet.adopted()


def test_nodes_that_obey_have_no_minute_without_a_driver_any_more():
    """So a driver that is cut off right after it has taken over misses them as soon as its successor expects."""
    found, (first, _, end) = taken_over(is_driver_gone=True)
    assert found.nodes.last_heard("node-1") > time.monotonic() + 30
    feed(found, [first, end])
    assert found.nodes.last_heard("node-1") <= time.monotonic()
    assert found.nodes.last_heard("node-2") > time.monotonic() + 30


@pytest.mark.parametrize(("is_driver_gone", "lost"), [(True, {"node-1"}), (False, set())])
def test_a_host_that_ray_counts_as_dead(is_driver_gone, lost):
    """It may be cut off, unless it was that of the last driver, whose process has ended."""
    found, (*_, end) = taken_over(is_driver_gone=is_driver_gone)
    for node in ("node-1", "node-2"):
        feed(found, [AgentLost(node=node, why="its host died", error=NodeDiedError("its host died"))])
    feed(found, [end])
    assert {node for node in ("node-1", "node-2") if found.nodes.is_lost(node)} == lost


def test_an_agent_that_is_slow_to_answer_holds_nobody_up(monkeypatch):
    """After a while the run goes on with the others. When it answers, it gets the orders that have come meanwhile."""
    monkeypatch.setattr(detached_driver, "_HEAR_SECONDS", 0.0)
    found, (first, second, _) = taken_over(is_driver_gone=True)
    feed(found, [first])
    fail(found, first)
    assert found.machine.attempt == 1, "it has decided before all had the time to answer"
    for event in found._due_events():
        found._step(event)
    assert found.machine.attempt == 2
    assert found.machine.roster == ("node-1", "node-2")
    goal = second.goal
    for node, order in found._detached.waiting:
        goal = goal.after(order) if node == "node-2" else goal
    feed(found, [replace(second, goal=goal)])
    assert not found.nodes.is_lost("node-2")


def test_an_agent_that_knows_of_an_attempt_that_the_ledger_has_not():
    """The last driver died when only this one had the order. All begin an attempt that nobody has heard of."""
    found, (first, second, end) = taken_over(is_driver_gone=True)
    goal = second.goal
    launches = [order for _, order in goal.orders if isinstance(order, LaunchWorkers)]
    later = replace(launches[-1], assignment=replace(launches[-1].assignment, attempt=2))
    feed(found, [first, replace(second, goal=goal.after(later)), end])
    assert (found.machine.attempt, found.machine.roster, found.machine.restarts) == (3, ("node-1", "node-2"), 0)


def fail(found, agent) -> None:
    """Let a worker of an agent's node fail, of which the driver hears."""
    failure = process_failure(1, 0, exit_code=1)
    status = agent.report.status.after(ProcessesExited(attempt=1, failures=(failure,)))
    report = AgentReport(sent_at=0.0, status=status)
    feed(found, [ReportReceived(node=agent.node, report=report, at=time.monotonic())])
