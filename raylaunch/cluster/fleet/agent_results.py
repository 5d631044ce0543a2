"""What functions returned, as the agents of the last attempt have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from raylaunch.cluster.ray_api import actor_errors
from raylaunch.core.newtypes import NodeId
from raylaunch.errors import ClusterError

VALUES_SECONDS = 60.0
"""For how long a node may report nothing while its results are fetched."""
LOOK_SECONDS = 1.0


def fetch(actors: Mapping[NodeId, Any], last_heard: Callable[[NodeId], float]) -> dict[int, bytes]:
    """Return the results by rank, however long they take, from agents that go on reporting. Raises ClusterError."""
    asked = {actor.values.remote(): node for node, actor in actors.items()}
    _await(asked, last_heard)
    try:
        parts = ray.get([*asked])
    except RayError as error:
        msg = f"the results could not be fetched from the nodes: {actor_errors.summary(error)}"
        raise ClusterError(msg) from error
    return {rank: value for part in parts for rank, value in part.items()}


def _await(asked: Mapping[Any, NodeId], last_heard: Callable[[NodeId], float]) -> None:
    """Wait for all answers. Ray reports a host that was cut off only after a minute, or ten."""
    began, missing = time.monotonic(), [*asked]
    while missing:
        _, missing = ray.wait(missing, num_returns=len(missing), timeout=LOOK_SECONDS)
        for node in [asked[ref] for ref in missing]:
            silent = time.monotonic() - max(began, last_heard(node))
            if silent >= VALUES_SECONDS:
                why = f"nothing was heard of it for {silent:.0f} s"
                raise ClusterError(f"the results of {node} could not be fetched: {why}")
