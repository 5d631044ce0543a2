"""The subreaper of a lost agent is asked once; where there is none, that is known at once."""

from __future__ import annotations

import queue
import socket

import pytest

from raylaunch.cluster.driver.copy_ring import CopyRing, KnownCopies
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.job.job import Job
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import NodeId
from raylaunch.node.protocol.copy_messages import CopyAddress
from tests.fakes import FakeFleet

NODE = NodeId("node-1")
GONE = AgentLost(node=NODE, why="its agent died")


@pytest.fixture
def served() -> dict[NodeId, CopyAddress]:
    """The agent has served what it held where nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {NODE: CopyAddress(node=NODE, host="127.0.0.1", port=port, secret="s")}


def ring(served: dict[NodeId, CopyAddress]) -> CopyRing:
    return CopyRing(Machine(Job()), FakeFleet(0), KnownCopies(served=served))


def test_a_loss_is_told_again_once_with_what_is_held(served):
    """Ray and the link may both tell of it meanwhile."""
    copies, told = ring(served), queue.SimpleQueue()
    assert copies.asks_subreaper(GONE, told.put)
    assert copies.asks_subreaper(GONE, told.put)
    again = told.get(timeout=60)
    assert again == AgentLost(node=NODE, why="its agent died", held=())
    assert not copies.asks_subreaper(again, told.put)
    assert told.empty()


def test_who_is_not_asked(served):
    """Agents without `State`, and those that were silent: their hosts may be gone, and a connection take long."""
    told: queue.SimpleQueue[AgentLost] = queue.SimpleQueue()
    assert not ring({}).asks_subreaper(GONE, told.put)
    assert not ring(served).asks_subreaper(AgentLost(node=NODE, why="silent", silent=True), told.put)
    assert told.empty()
