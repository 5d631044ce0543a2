"""What functions returned, as the agents of the last attempt have it: moved part by part, beside their reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future

from raylaunch.cluster.fleet_api import Fleet
from raylaunch.core.newtypes import NodeId
from raylaunch.errors import ClusterError
from raylaunch.node.supervisor.attempt_state import PART_BYTES

SILENT_SECONDS = 60.0
"""For how long a node may report nothing while its results are fetched."""
LOOK_SECONDS = 1.0


def fetch(fleet: Fleet, nodes: Mapping[int, NodeId], last_heard: Callable[[NodeId], float]) -> dict[int, bytearray]:
    """Return the pickled results by rank, empty for a rank whose process ended before its function returned.

    `nodes`: the node of each rank. `last_heard`: when it last reported, in time.monotonic(). A result may take as long
    as its node goes on reporting. Raises ClusterError.
    """
    began = time.monotonic()
    found = {rank: bytearray() for rank in nodes}
    asked: dict[Future[bytes], int] = {fleet.read_result(node, rank, 0): rank for rank, node in nodes.items()}
    while asked:
        for future in futures.wait(asked, LOOK_SECONDS, futures.FIRST_COMPLETED).done:
            rank = asked.pop(future)
            try:
                part = future.result()
            except Exception as error:
                raise _lost(rank, nodes[rank], str(error)) from error
            found[rank] += part
            if len(part) == PART_BYTES:
                asked[fleet.read_result(nodes[rank], rank, len(found[rank]))] = rank
        for rank in asked.values():
            silent = time.monotonic() - max(began, last_heard(nodes[rank]))
            if silent >= SILENT_SECONDS:
                raise _lost(rank, nodes[rank], f"nothing was heard of it for {silent:.0f} s")
    return found


def _lost(rank: int, node: NodeId, why: str) -> ClusterError:
    return ClusterError(f"what rank {rank} returned could not be fetched from {node}: {why}")
