"""The fixtures of the harness, for this folder, and a worker without a node."""

import pytest

from tests.node.harness import ears, either, mark, no_leaks, node, own, warm_forking, warm_spawning
from tests.worker.alone import Alone

__all__ = ["alone_worker", "ears", "either", "mark", "no_leaks", "node", "own", "warm_forking", "warm_spawning"]


@pytest.fixture
def alone_worker(tmp_path):
    found = Alone(tmp_path)
    yield found
    found.close()
