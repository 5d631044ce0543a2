"""A capability of the runs of groups: each rank knows its node in Ray, by the variable RAYLAUNCH_RAY_NODE.

And it fails if it exits before the caller has let it end, also with code 0: else the others would wait for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from raylaunch.cluster.capability import AgentPart, AgentPort, Capability, DriverPart, DriverPort
from raylaunch.core.placement.environment import Assignment
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker_group.rank.serving import RAY_NODE


class _NothingToDecide(DriverPart):
    def __init__(self, port: DriverPort) -> None:
        """Use nothing of the port."""


class _NodeNamer(AgentPart):
    def __init__(self, port: AgentPort) -> None:
        del port
        ray: Any = sys.modules.get("ray")
        self._node = ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else ""

    def workers(self, assignment: Assignment, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Add the variable."""
        del assignment
        return tuple(replace(spec, env=spec.env | {RAY_NODE: self._node}, must_return=True) for spec in specs)


CAPABILITY = Capability(name="ray_node", driver=_NothingToDecide, agent=_NodeNamer)
