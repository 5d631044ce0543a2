"""How long a driver that was started again looks for the ledger of the last one. Without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RpcError

from raylaunch.cluster import named_resources
from raylaunch.cluster.agent.agent_session import Adoption
from raylaunch.cluster.driver import interim_keeper, succession
from raylaunch.cluster.driver.interim_keeper import InterimState
from raylaunch.cluster.driver.succession import UnansweredError, await_ledger
from raylaunch.node.protocol.node_goal import NodeGoal

FOUND: Any = object()
SILENT = UnansweredError("node-1")


@dataclass
class Clock:
    """Looks at what `finds` has until so many seconds; then the next of them."""

    finds: list[tuple[float, Any]]
    now: float = 1000.0
    looks: int = 0
    said: list[str] = field(default_factory=list)

    def look(self) -> Any:
        self.looks += 1
        found = next((found for until, found in self.finds if self.now - 1000.0 < until), FOUND)
        if isinstance(found, Exception):
            raise found
        return found

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, patience: float) -> Any:
        return await_ledger(self.look, patience, self.said.append, clock=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize("error", [SILENT, RpcError("no connection"), RuntimeError("Failed to list named actors")])
def test_who_does_not_answer_is_awaited_as_long_as_it_may_keep_the_ledger(error):
    """As long as agents wait for a driver."""
    clock = Clock([(500.0, error)])
    assert clock.wait(605.0) is FOUND
    assert 500.0 <= clock.now - 1000.0 < 503.0
    assert clock.looks < 300
    assert {*clock.said} == {f"{'node-1' if error is SILENT else 'the head of the cluster'} does not answer"}
    late = Clock([(700.0, error)])
    assert late.wait(605.0) is None
    assert 605.0 <= late.now - 1000.0 < 608.0


def test_if_all_have_answered_and_nobody_keeps_a_state_it_is_soon_over():
    """What was requested may still come, or another driver's part may just end. Who did not answer is awaited first."""
    clock = Clock([(1e9, None)])
    assert clock.wait(605.0) is None
    assert 30.0 <= clock.now - 1000.0 < 33.0
    assert clock.said == []
    clock = Clock([(100.0, SILENT), (120.0, None)])
    assert clock.wait(605.0) is FOUND
    clock = Clock([(100.0, SILENT), (1e9, None)])
    assert clock.wait(605.0) is None
    assert 126.0 <= clock.now - 1000.0 < 135.0


def test_what_is_no_lack_of_an_answer_ends_it():
    """To look again would not mend it."""
    with pytest.raises(ValueError, match="damaged"):
        Clock([(1e9, ValueError("damaged"))]).wait(605.0)


# Whom it asks.


@pytest.fixture
def cluster(monkeypatch) -> Iterator[SimpleNamespace]:
    """A cluster with agents that answer, or not. `answers`: an `Adoption` or an exception, by node; None: nothing yet."""
    found = SimpleNamespace(answers={}, announced=[], interim=None)

    def get(asked):
        if isinstance(asked, list):
            return [get(each) for each in asked]
        if isinstance(found.answers[asked], Exception):
            raise found.answers[asked]
        return found.answers[asked]

    def wait(asked, **_):
        ready = [each for each in asked if found.answers[each] is not None]
        return ready, [each for each in asked if each not in ready]

    def look(*_):
        if found.interim is not None:
            raise found.interim

    class Agent:
        def __init__(self, name):
            self.look = SimpleNamespace(remote=lambda: name)

    monkeypatch.setattr(succession, "ray", SimpleNamespace(get=get, wait=wait))
    monkeypatch.setattr(succession, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(interim_keeper, "look", look)
    monkeypatch.setattr(named_resources, "agents", lambda _: {node: node for node in found.answers})
    monkeypatch.setattr(named_resources, "actor", Agent)
    monkeypatch.setattr(named_resources, "announce", lambda _, epoch: found.announced.append(epoch))
    allocator = SimpleNamespace(slots=SimpleNamespace(up_nodes=lambda: ["node-1"]))
    ledger = SimpleNamespace(facts=SimpleNamespace(request=b""), allocator=allocator)
    monkeypatch.setattr(succession.ledgers, "load", lambda _: ledger)
    return found


def test_an_interim_keeper_that_was_not_told_what_to_keep_is_none(monkeypatch):
    """The first driver was killed when it had started it. Then the command tells the next one again what to run."""
    actor = SimpleNamespace(look=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=InterimState)))
    monkeypatch.setattr(named_resources, "actor", lambda _: actor)
    monkeypatch.setattr(interim_keeper, "ray", SimpleNamespace(get=lambda found, **_: found))
    assert interim_keeper.look("token", 1.0) is None


KEPT = Adoption(epoch=1, kept=(1, 7), ledger=b"ledger")


def test_an_agent_that_cannot_be_reached_does_not_hide_those_that_answer(cluster):
    """Ray says so of a host that was lost a moment ago, by an error that is not that of a dead one."""
    cluster.answers = {"node-2": ActorUnavailableError("node-2", b"0" * 16), "node-1": KEPT, "node-3": None}
    found = succession.find("token", 0.0)
    assert found is not None
    assert (found.epoch, cluster.announced) == (2, [2])


def test_an_agent_that_may_keep_the_only_ledger_is_awaited(cluster):
    """Not one that has died, which keeps nothing."""
    unreached = ActorUnavailableError("node-10", b"0" * 16)
    cluster.answers = {"node-10": unreached, "node-9": None, "node-1": Adoption(epoch=1), "node-4": ActorDiedError()}
    with pytest.raises(UnansweredError, match=r"an agent that may keep the ledger \(node-9, node-10\)"):
        succession.find("token", 0.0)
    cluster.answers = {"node-1": Adoption(epoch=1), "node-4": ActorDiedError()}
    assert succession.find("token", 0.0) is None


def test_an_old_ledger_is_not_taken_for_the_newest_before_its_keepers_have_answered(cluster, monkeypatch):
    """All nodes that were up by it have answered; but one of them was shown a goal of which it has no ledger."""
    shown = NodeGoal(generation=9)
    late = Adoption(epoch=1, kept=(1, 9), ledger=b"new", goal=shown)
    cluster.answers = {"node-1": Adoption(epoch=1, kept=(1, 2), ledger=b"old", goal=shown), "node-2": None}
    wait = succession.ray.wait

    def one_after_the_other(asked, **_):
        ready = wait(asked)
        cluster.answers["node-2"] = late
        return ready

    monkeypatch.setattr(succession.ray, "wait", one_after_the_other)
    allocator = SimpleNamespace(slots=SimpleNamespace(up_nodes=lambda: ["node-1"]))

    def load(message):
        return SimpleNamespace(facts=SimpleNamespace(request=message), allocator=allocator)

    monkeypatch.setattr(succession.ledgers, "load", load)
    found = succession.find("token", 0.0)
    assert found is not None
    assert found.request == b"new"


@pytest.mark.parametrize("error", [GetTimeoutError("2 s"), ActorUnavailableError("it", b"0" * 16)])
def test_an_interim_keeper_that_does_not_answer_is_awaited(cluster, error):
    """It exists only while no agent keeps the newest ledger."""
    cluster.interim, cluster.answers = error, {"node-1": KEPT}
    with pytest.raises(UnansweredError, match="the interim keeper of the ledger"):
        succession.find("token", 0.0)
