"""The fixtures of tests/node, and a worker without a node."""

import pytest

from tests.node.conftest import *  # noqa: F403 - its fixtures
from tests.warm_python import WarmPython
from tests.worker.alone import Alone, environment


@pytest.fixture(scope="session")
def warm_torch(tmp_path_factory):
    """A process that has imported what takes seconds, and forks programs."""
    modules = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.checkpoint")
    at = tmp_path_factory.mktemp("warm") / "torch.sock"
    found = WarmPython(*modules, env=environment({}), flags=("-u",), at=at)
    yield found
    found.close()


@pytest.fixture
def alone_worker(tmp_path, warm_torch):
    found = Alone(tmp_path, warm_torch)
    yield found
    found.close()
