"""What Ray says of drains and deaths, in our words."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
)

from raylaunch.cluster import losses
from raylaunch.cluster.actor import Agent
from raylaunch.cluster.drains import Notices


def died(message: str, *, reason: int = NodeDeathInfo.UNSPECIFIED) -> ActorDiedError:
    """As Ray builds it from what its head knows."""
    info = NodeDeathInfo(reason=reason)
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"1" * 16, node_death_info=info))


def raised() -> ActorDiedError:
    """In `__init__`, as Ray brings it over."""
    cause = FileNotFoundError("no such folder")
    text = "Traceback (most recent call last):\n  ...\nFileNotFoundError: no such folder"
    return ActorDiedError(RayTaskError("Agent.__init__", text, cause, actor_id="1"))


NODE_DIED = "The actor died because its node has died. Node Id: 12"
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (died(KILLED), "its agent died"),
        (died(NODE_DIED), "its host died"),
        (died(NODE_DIED, reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED), "its host was taken away"),
        (NodeDiedError("The node is gone"), "its host died"),
        (OutOfMemoryError("Memory was 95 %"), "Ray ended its agent, since the memory of its host ran out"),
        (ActorUnavailableError("Socket closed", b"1" * 16), "the connection to its agent broke off"),
        (raised(), "FileNotFoundError: no such folder"),
        (GetTimeoutError("too late"), "too late"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_why_an_agent_is_gone(error, words):
    """One line; that memory ran out is said only where Ray knows it."""
    assert losses.in_words(error) == words


def test_what_is_hopeless():
    """An agent that refused to start; whatever was done to it from outside may not happen again."""
    assert losses.hopeless(raised())
    assert not any(map(losses.hopeless, (died(KILLED), died(NODE_DIED), RuntimeError("creation task"), None)))


def test_a_notice_is_told_once():
    """And again where its deadline has moved, or where it was taken back and given again."""
    notices = Notices()

    def told(**found: int) -> list[tuple[str, float]]:
        return [(notice.host, notice.deadline) for notice in notices.fresh(found, 1000.0, 50.0)]

    assert told(a=1030_000) == [("a", 80.0)]
    assert told(a=1030_000) == []
    assert told(a=1030_000, b=1010_000) == [("b", 60.0)]
    assert told(a=1020_000, b=1010_000) == [("a", 70.0)]
    assert told() == []
    assert told(b=1010_000) == [("b", 60.0)]


def test_a_notice_without_a_deadline():
    """Two minutes are assumed, and said to be."""
    (notice,) = Notices().fresh({"a": 0}, 1000.0, 50.0)
    assert notice.deadline == 170.0
    assert "120 s are assumed" in notice.why


def test_a_notice_whose_deadline_is_over():
    """It is fresh, so it is our clock that is wrong, or theirs: the host is there, and may be for a while."""
    (notice,) = Notices().fresh({"a": 990_000}, 1000.0, 50.0)
    assert notice.deadline == 60.0
    assert "10 s are assumed, since its deadline is past by our clock" in notice.why


def test_an_order_that_fails_is_told_of():
    """Nothing comes back of an order itself: the next word of the agent does."""
    mistakes: list[Exception] = []
    node = SimpleNamespace(mistaken=mistakes.append)
    agent = object.__new__(Agent)
    agent._agent = node
    asyncio.run(agent.order(pickle.dumps(("stop", (1, 0.0, "SIGTERM")))))
    assert [str(mistake) for mistake in mistakes] == ["'types.SimpleNamespace' object has no attribute 'stop'"]
