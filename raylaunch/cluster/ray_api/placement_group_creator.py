"""Placement groups that end with the process that wants them, where that is an actor or a task.

Ray removes a placement group when its creator's job has ended and, if an actor has created it, that actor. So what an
actor that is killed has reserved would stay as long as the job. For a detached actor Ray does not wait for the job: so
such an actor is the creator, and it ends with the process that it is for.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster.agent.lease import FIRST_CALL_SECONDS, end_this_process
from raylaunch.cluster.succession.registry_key import NAMESPACE


class PlacementGroupCreator:
    """The actor. It ends with its process, or if it is not told with whom to end."""

    def __init__(self) -> None:
        self._unbegun = threading.Timer(FIRST_CALL_SECONDS, end_this_process)
        self._unbegun.daemon = True
        self._unbegun.start()

    async def never(self) -> None:
        """Do not return: the caller owns an object that is never there."""
        await asyncio.Event().wait()

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def end_with(self, owned: list[Any]) -> None:
        """End this process when the owner of an object has ended that is never there: then Ray raises an error."""
        self._unbegun.cancel()
        try:
            await owned[0]
        finally:
            end_this_process()

    async def create(self, bundles: list[dict[str, float]], options: dict[str, Any]) -> PlacementGroup:
        """Request a placement group."""
        return placement_group(bundles, **options)


def is_needed() -> bool:
    """Return whether this process is an actor or a task."""
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def start() -> Any:
    """Start the actor for this process, on its host."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    named = {"name": f"raylaunch-groups-{secrets.token_hex(8)}", "namespace": NAMESPACE, "lifetime": "detached"}
    creator = _class().options(num_cpus=0, num_gpus=0, scheduling_strategy=here, **named).remote()
    creator.end_with.remote([creator.never.remote()])
    return creator


@functools.cache
def _class() -> Any:
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(PlacementGroupCreator)
