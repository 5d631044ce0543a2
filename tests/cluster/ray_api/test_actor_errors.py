"""Ray's errors about actors, in one line each."""

from __future__ import annotations

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

from raylaunch.cluster.agent.ray_actor import AgentStartError
from raylaunch.cluster.ray_api import actor_errors


def died(message: str, *, reason: int = NodeDeathInfo.UNSPECIFIED) -> ActorDiedError:
    """As Ray builds it from what its head knows."""
    info = NodeDeathInfo(reason=reason)
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"1" * 16, node_death_info=info))


def cannot_start() -> RayTaskError:
    """Raised by `next_report` after a `begin` that failed."""
    text = "Traceback (most recent call last):\n  ...\nAgentStartError: FileNotFoundError: no such folder"
    error = RayTaskError("AgentActor.next_report", text, AgentStartError("FileNotFoundError: no such folder"))
    return error.as_instanceof_cause()


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
        (cannot_start(), "FileNotFoundError: no such folder"),
        (GetTimeoutError("too late"), "too late"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_why_an_agent_is_gone(error, words):
    """That memory ran out is said only if Ray knows it."""
    assert actor_errors.summary(error) == words


def test_an_error_at_the_start():
    """It would be raised again; what was done to an agent from outside may not happen again."""
    assert actor_errors.is_raised_at_start(raised())
    assert actor_errors.is_raised_at_start(cannot_start())
    assert not any(
        map(actor_errors.is_raised_at_start, (died(KILLED), died(NODE_DIED), RuntimeError("creation task"), None))
    )
