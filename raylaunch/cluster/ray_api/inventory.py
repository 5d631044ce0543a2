"""The nodes of a Ray cluster with their resources, as the core plans with them."""

from __future__ import annotations

from typing import Any

import ray
from ray._private import state

from raylaunch.cluster.local import local_machine
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.packing import NodeFacts


def nodes(*, local: bool) -> tuple[NodeFacts, ...]:
    """Return the nodes that are alive and not being drained. `local`: this process started Ray for the run."""
    free = state.available_resources_per_node()
    draining = state.state.get_draining_nodes()
    return tuple(
        _facts(node, free.get(node["NodeID"], {}), local=local)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    )


def _facts(node: dict[str, Any], free: dict[str, float], *, local: bool) -> NodeFacts:
    total: dict[str, float] = node["Resources"]
    return NodeFacts(
        node_id=HostId(node["NodeID"]),
        address=local_machine.LOOPBACK if local else str(node["NodeManagerAddress"]),
        cpus=total.get("CPU", 0.0),
        gpus=total.get("GPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        labels=dict(node["Labels"]),
    )
