"""Ray's errors about actors in one line each: why an agent is gone."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayActorError

from raylaunch.cluster.agent.ray_actor import AgentError, AgentStartError, AgentVersionError
from raylaunch.cluster.agent.serialization import version
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.errors import ClusterError

_OF_THE_CONSTRUCTOR = "creation task"
_NODE_DIED = "its node has died"
"""Texts in Ray's messages."""
_OTHER_CODE = re.compile(
    r"\bAgent\w*\.__init__\(\) (missing|takes) \d+ |No module named 'raylaunch\."
    r"|module 'raylaunch[\w.]*' has no attribute|attribute '\w+' on <module 'raylaunch\b"
    r"|cannot import name '\w+' from 'raylaunch\b"
)
"""Errors of Python where the agent's class differs, or is elsewhere: raylaunch 0.1 has it in another form."""


def is_raised_at_start(error: BaseException | None) -> bool:
    """Return whether the agent could not start, so that another one on the same host could not either."""
    if isinstance(error, AgentStartError):
        return True
    return isinstance(error, RayActorError) and _OF_THE_CONSTRUCTOR in str(error)


def is_of_another_version(error: BaseException | None) -> bool:
    """Return whether the agent could not start because its host has another raylaunch, however old."""
    return isinstance(error, AgentVersionError) or (is_raised_at_start(error) and _has_other_code(error))


def _has_other_code(error: BaseException | None) -> bool:
    return isinstance(error, RayActorError) and bool(_OTHER_CODE.search(str(error)))


def is_of_dead_host(error: BaseException | None) -> bool:
    """Return whether the agent is gone since Ray counts its host as dead."""
    return isinstance(error, NodeDiedError) or (isinstance(error, ActorDiedError) and _NODE_DIED in str(error))


def summary(error: BaseException) -> str:
    """Return why an agent is gone, in one line for a person."""
    if isinstance(error, AgentError):
        return str(getattr(error, "cause", error))  # `RayTaskError` has the error that was raised as its `cause`
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError):
        return "Ray ended its agent, since the memory of its host ran out"
    if is_of_dead_host(error):
        return "its host was taken away" if getattr(error, "preempted", False) else "its host died"
    if isinstance(error, ActorUnavailableError):
        return "the connection to its agent broke off"
    if is_raised_at_start(error) and _has_other_code(error):
        return f"its host has a raylaunch that does not say its version, and the driver has raylaunch {version()}"
    if isinstance(error, RayActorError) and lines and not is_raised_at_start(error):
        return "its agent died"
    return lines[-1] if lines else type(error).__name__


def cannot_start(gone: AgentLost, address: str) -> ClusterError:
    """Return what a person is told of an agent that no other one can take the place of. `address`: of its host."""
    if "No module named 'raylaunch'" in str(gone.error):
        return ClusterError(
            "raylaunch is not installed on the nodes of the cluster",
            hint="install it there, or name it in the `pip` of the job's runtime environment",
        )
    hint = "install the same raylaunch and Ray on all nodes" if is_of_another_version(gone.error) else ""
    where = f" ({address})" if address else ""
    return ClusterError(f"the agent of {gone.node}{where} cannot start: {gone.why}", hint=hint)
