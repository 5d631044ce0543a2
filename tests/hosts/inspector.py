"""Answers questions about Ray's state on the head's host: a line of JSON for each. It is not a driver of Ray's.

It uses the private API, since the public one needs the dashboard or makes its user a driver.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from functools import partial
from typing import Any

import grpc
from ray._private.state import state
from ray._raylet import GcsClient, GcsClientOptions
from ray.core.generated import autoscaler_pb2, gcs_service_pb2, gcs_service_pb2_grpc


def nodes() -> dict[str, Any]:
    """Return all nodes that Ray ever knew, by id."""
    return {
        node["NodeID"]: {
            "address": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "death": f"{node.get('DeathReason', '')} {node.get('DeathReasonMessage', '')}".strip(),
        }
        for node in state.node_table()
    }


def left() -> list[str]:
    """Return the actors that are not dead and the placement groups that are not removed."""
    actors = [
        f"actor {actor['ActorClassName']} {actor['ActorID']} {actor['State']}"
        for actor in state.actor_table(None).values()
        if actor["State"] != "DEAD"
    ]
    groups = [
        f"group {group['placement_group_id']} {group['state']}"
        for group in state.placement_group_table().values()
        if group["state"] != "REMOVED"
    ]
    return actors + groups


def draining() -> dict[str, int]:
    """Return the deadlines of drains in milliseconds since 1970, by node id."""
    return state.get_draining_nodes()


def drain(client: GcsClient, node_id: str, seconds: float, why: str) -> list[Any]:
    """Drain a node; return whether Ray accepted that, and why not."""
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    return list(client.drain_node(node_id, reason, why, int((time.time() + seconds) * 1000)))


def bury(client: GcsClient, node_id: str) -> None:
    """Report the end of a raylet as raylets do themselves; Ray would otherwise notice after half a minute or more."""
    request = gcs_service_pb2.UnregisterNodeRequest(node_id=bytes.fromhex(node_id))
    with grpc.insecure_channel(os.environ["RAY_ADDRESS"]) as channel:
        gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).UnregisterNode(
            request,
            timeout=10,
            metadata=[
                ("authorization", f"Bearer {os.environ['RAY_AUTH_TOKEN']}"),
                ("ray_cluster_id", client.cluster_id.hex()),
            ],
        )


def connect(address: str) -> GcsClient:
    """Wait for the head, and return a client of it."""
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)  # noqa: SLF001 - Ray has no public way
    state.node_table()
    return GcsClient(address=address)


def main() -> None:
    client = connect(os.environ["RAY_ADDRESS"])
    questions = {
        "nodes": nodes,
        "left": left,
        "draining": draining,
        "drain": partial(drain, client),
        "bury": partial(bury, client),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        question, *more = json.loads(line)
        print(json.dumps(questions[question](*more)), flush=True)


main()
