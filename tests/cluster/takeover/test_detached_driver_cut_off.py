"""A driver that may be cut off, while another one is in command, launches nothing and writes no result."""

# ruff: noqa: SLF001 - the driver is stepped from outside, which only its own loop does

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from ray.exceptions import NodeDiedError

from raylaunch.cluster.fleet_api import AgentLost, AgentsAdopted, CommandTaken
from raylaunch.cluster.takeover import detached_driver
from raylaunch.cluster.takeover.driver_state import load
from raylaunch.core.job.job import Entrypoint, Job
from tests.cluster.takeover.test_detached_driver import CourseFleet, driver, feed


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
        self.heard: set[str] = set()

    @property
    def has_unsent(self) -> bool:
        return bool(self.waiting)

    def send(self, node, order) -> None:
        self.waiting.append((node, order))

    def flush(self, state) -> None:
        waiting, self.waiting = self.waiting, []
        for node, order in waiting:
            self.obey(node, order)

    def launched(self) -> list[int]:
        """Return the attempts for which a node has had its order."""
        return sorted({order[2] for order in self.sent if order[0] == "launch"})


def heard(found, fleet: OrderlyFleet) -> None:
    """Have the driver deal with all that its agents say, until they say no more."""
    feed(found, [])
    found._stepped()
    while fleet.unheard:
        feed(found, [fleet.unheard.popleft()])


def two_nodes(taken=None):
    """Return a driver whose attempt 1 runs on two hosts, of which it is on the first."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", max_restarts=1, last_call=0.0, join_timeout=20.0)
    fleet = OrderlyFleet()
    found = driver(fleet, job, taken)
    found._folder.fence = Fence()
    found._begin()
    fleet.join_on("host-0")
    fleet.join_on("host-1")
    heard(found, fleet)
    return found, fleet


def test_agents_get_only_sealed_states(monkeypatch):
    """From the first one on, which an interim keeper may get."""
    states: list[bytes] = []
    monkeypatch.setattr(OrderlyFleet, "flush", lambda _, state: states.append(state))
    fleet = OrderlyFleet()
    found = driver(fleet, Job(entrypoint=Entrypoint(script="train.py"), nnodes="1"))
    found._seal = lambda state: b"sealed"
    found._begin()
    fleet.join_on("host-0")
    heard(found, fleet)
    assert states == [b"sealed"] * len(states) != []


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
    before, _ = two_nodes()
    found, _ = two_nodes(load(before.state()))
    told = []
    found._on_command = told.append
    found._is_in_command = lambda: None
    monkeypatch.setattr(found, "_is_cut_off", lambda _: False)
    monkeypatch.setattr(detached_driver.Driver, "run", lambda _: "the end")
    with pytest.raises(LeftError, match="reaches neither"):
        found.run()
    feed(found, [CommandTaken()])
    assert (told, found.run()) == ([""], "the end")


def taken_over(*, is_driver_gone: bool):
    """Return a driver that takes over from one on the first host of two; no agent has answered yet."""
    before, _ = two_nodes()
    state = replace(load(before.state()), is_driver_gone=is_driver_gone)
    job = before.machine.job
    found = driver(OrderlyFleet(), job, state)
    found._begin()
    return found


def test_nodes_that_obey_have_no_minute_without_a_driver_any_more():
    """So a driver that is cut off right after it has taken over misses them as soon as its successor expects."""
    found = taken_over(is_driver_gone=True)
    assert found.nodes.last_heard("node-1") > time.monotonic() + 30
    found._detached.adopted = {"node-1"}
    feed(found, [AgentsAdopted()])
    assert found.nodes.last_heard("node-1") <= time.monotonic()
    assert found.nodes.last_heard("node-2") > time.monotonic() + 30


@pytest.mark.parametrize(("is_driver_gone", "lost"), [(True, {"node-1"}), (False, set())])
def test_a_host_that_ray_counts_as_dead(is_driver_gone, lost):
    """It may be cut off, unless it was that of the last driver, whose process has ended."""
    found = taken_over(is_driver_gone=is_driver_gone)
    for node in ("node-1", "node-2"):
        feed(found, [AgentLost(node=node, why="its host died", error=NodeDiedError("its host died"))])
    assert {*found.nodes.lost()} == lost
