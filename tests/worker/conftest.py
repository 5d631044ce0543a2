"""The fixtures of the node harness, and a worker without a node."""

import pytest

from tests.node.harness import (
    either,
    mark,
    no_leaks,
    node,
    own_node,
    pipe,
    shared_forkserver_node,
    shared_spawn_node,
    shared_torch_node,
    torch_either,
    torch_node,
)
from tests.warm_python import WarmPython
from tests.worker.alone import Alone, environment

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
    "shared_torch_node",
    "torch_either",
    "torch_node",
    "warm_torch",
]


@pytest.fixture(scope="session")
def warm_torch():
    """A process that has imported what takes seconds, and forks programs."""
    found = WarmPython("torch._dynamo", "torch.distributed.fsdp", env=environment({}), flags=("-u",))
    yield found
    found.close()


@pytest.fixture
def alone_worker(tmp_path, warm_torch):
    found = Alone(tmp_path, warm_torch)
    yield found
    found.close()
