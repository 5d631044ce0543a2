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

from raylaunch.cluster.agent.ray_actor import AgentStartError, AgentVersionError
from raylaunch.cluster.agent.serialization import version
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


def raised(text: str = "FileNotFoundError: no such folder") -> ActorDiedError:
    """In `__init__`, as Ray brings it over."""
    cause = FileNotFoundError("no such folder")
    text = f"Traceback (most recent call last):\n  ...\n{text}"
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


@pytest.mark.parametrize(
    "text",
    [
        "TypeError: AgentActor.__init__() missing 1 required positional argument: 'spec'",
        "RuntimeError: The actor with name AgentActor failed to import:\n\nNo module named 'raylaunch.cluster.agent'",
        "AttributeError: Can't get attribute 'AgentActor' on <module 'raylaunch.cluster.agent' from '/x/__init__.py'>",
        "ImportError: cannot import name 'Agent' from 'raylaunch.cluster' (/x/__init__.py)",
    ],
)
def test_a_raylaunch_that_is_too_old_to_say_its_version(text):
    """Its agent has another constructor, or is somewhere else."""
    error = raised(text)
    assert actor_errors.is_of_another_version(error)
    assert actor_errors.summary(error) == (
        f"its host has a raylaunch that does not say its version, and the driver has raylaunch {version()}"
    )


def test_other_errors_at_the_start_say_nothing_of_the_version():
    others = (
        raised(),
        cannot_start(),
        raised("ModuleNotFoundError: No module named 'raylaunch'"),
        RuntimeError(),
        None,
    )
    assert not any(map(actor_errors.is_of_another_version, others))
    assert actor_errors.is_of_another_version(AgentVersionError("its host has raylaunch 1.0"))
