"""The fixtures of the node harness, and a worker without a node."""

import pytest

from tests.node.harness import either, mark, no_leaks, node, own_node, pipe, shared_forkserver_node, shared_spawn_node
from tests.worker.alone import Alone

__all__ = [
    "alone_worker",
    "either",
    "mark",
    "no_leaks",
    "node",
    "own_node",
    "pipe",
    "shared_forkserver_node",
    "shared_spawn_node",
]


@pytest.fixture
def alone_worker(tmp_path):
    found = Alone(tmp_path)
    yield found
    found.close()
