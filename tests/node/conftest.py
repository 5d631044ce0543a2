"""The fixtures of the harness, for this folder, and a process that has imported torch."""

import os
from collections.abc import Iterator

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
    shared_state_node,
    shared_torch_node,
    state_node,
    torch_either,
    torch_node,
)
from tests.warm_python import WarmPython

__all__ = [
    "either",
    "mark",
    "no_leaks",
    "node",
    "own_node",
    "pipe",
    "shared_forkserver_node",
    "shared_spawn_node",
    "shared_state_node",
    "shared_torch_node",
    "state_node",
    "torch_either",
    "torch_node",
]


@pytest.fixture(scope="session")
def warm_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """What has imported torch and forks programs of tests, so that none of them takes 2 s of CPU for it."""
    modules = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    warm = WarmPython(*modules, env=env, at=tmp_path_factory.mktemp("warm") / "torch.sock")
    yield warm
    warm.close()
