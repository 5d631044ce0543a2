"""What the cluster has: Ray's nodes as facts for the core."""

from __future__ import annotations

from typing import Any

import ray
from ray._private import state

from raylaunch.cluster import here
from raylaunch.core.layout import NodeFacts


def nodes(*, local: bool) -> tuple[NodeFacts, ...]:
    """The nodes that are alive and not being drained, with what is free on each right now. `local`: Ray is ours."""
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
        node_id=str(node["NodeID"]),
        address=here.LOOPBACK if local else str(node["NodeManagerAddress"]),
        cpus=total.get("CPU", 0.0),
        gpus=total.get("GPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        labels=dict(node["Labels"]),
    )
