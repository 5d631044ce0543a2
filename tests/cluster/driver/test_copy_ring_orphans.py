"""The state keeper of a lost agent is asked once; where there is none, that is known at once."""

from __future__ import annotations

import pickle
import queue
import socket

import pytest

from raylaunch.cluster.driver.copy_ring import OrphanInquiry
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.newtypes import NodeId
from raylaunch.node.protocol.copy_messages import CopyAddress

NODE = NodeId("node-1")
GONE = AgentLost(node=NODE, why="its agent died")


@pytest.fixture
def nobody() -> CopyAddress:
    """Where nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return CopyAddress(node=NODE, host="127.0.0.1", port=port, secret="s")


def test_a_loss_is_told_again_once_with_what_is_held(nobody):
    """Ray and the link may both tell of it meanwhile."""
    inquiry, told = OrphanInquiry(), queue.SimpleQueue()
    assert inquiry.is_open(GONE, nobody, told.put)
    assert inquiry.is_open(GONE, nobody, told.put)
    again = told.get(timeout=60)
    assert again == AgentLost(node=NODE, why="its agent died", held=())
    assert not inquiry.is_open(again, nobody, told.put)
    assert told.empty()


def test_who_is_not_asked(nobody):
    """Agents without `State`, and those that were silent: their hosts may be gone, and a connection take long."""
    inquiry, told = OrphanInquiry(), queue.SimpleQueue()
    assert not inquiry.is_open(GONE, None, told.put)
    assert not inquiry.is_open(AgentLost(node=NODE, why="silent", silent=True), nobody, told.put)
    assert told.empty()


def test_another_driver_asks_again(nobody):
    """The answer goes to the process that has asked: if that is gone, the loss would never be dealt with."""
    inquiry, told = OrphanInquiry(), queue.SimpleQueue()
    assert inquiry.is_open(GONE, nobody, lambda _: None)
    restored = pickle.loads(pickle.dumps(inquiry))
    assert restored.is_open(GONE, nobody, told.put)
    assert told.get(timeout=60).held == ()
