"""An agent with a real fork server, and without Ray: the end of a node whose lease expires."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from raylaunch.capabilities.state.agent import StateCopies
from raylaunch.cluster.agent.agent import Agent, Home, LeaseExpiredError
from raylaunch.core.newtypes import HostId
from raylaunch.node.protocol.node_goal import OpenStore
from raylaunch.node.protocol.node_spec import AgentSpec
from tests.cluster.agent.test_ray_actor import SPEC
from tests.private_cluster import MARK, end_marked, marked

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def spec(tmp_path) -> AgentSpec:
    """A node of a detached run, whose lease lasts 1.8 s. No process of it is left after the test."""
    mark = os.urandom(8).hex()
    job = replace(SPEC.job, env={MARK: mark}, node_timeout=2.0, driver_timeout=100.0)
    yield replace(SPEC, job=job, run_dir=str(tmp_path), cwd=str(tmp_path), epoch=0, token="t")
    left = marked(mark)
    end_marked(mark)
    assert left == []


def is_there(path: str) -> bool:
    return os.path.exists(path)


def test_a_node_whose_driver_stands_still(spec):
    """Its processes end. A driver that calls again later learns that, so that it starts another node.

    It does not take the node for alive, nor does the node carry out what it is told.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        home = Home(host=HostId("a"), address="127.0.0.1", environ=os.environ)
        expired = asyncio.Event()
        agent = Agent(spec, home, end=lambda: loop.call_soon_threadsafe(expired.set))
        status = None
        while status is None or status.up is None:  # until the fork server is ready
            status = (await agent.next_report()).status or status
        assert marked(spec.job.env[MARK])
        folder = agent._supervisor.state.files.folder.root  # noqa: SLF001
        assert is_there(folder)
        await expired.wait()
        called = asyncio.create_task(agent.next_report())
        await asyncio.sleep(0)
        assert not called.done(), "nothing proves yet that the workers have ended"
        await agent.end_node()
        assert marked(spec.job.env[MARK]) == []
        assert not is_there(folder), "if this process is killed now, nobody would remove that"
        assert agent.session.look().is_over
        for _ in range(2):
            agent.handle(OpenStore(attempt=1))
            with pytest.raises(LeaseExpiredError):
                await (called if not called.done() else agent.next_report())
        await agent.close()

    asyncio.run(run())


def test_a_node_that_cannot_write_checkpoints(spec):
    """It is not started."""
    job = replace(spec.job, durable="/proc/new")
    home = Home(host=HostId("a"), address="10.0.0.7", environ=os.environ)
    told = replace(spec, job=job, address="10.0.0.7", parts={"state": StateCopies})

    async def start() -> None:
        with pytest.raises(
            OSError, match=r"to /proc/new on the node 10\.0\.0\.7: /proc cannot be written: No such file"
        ):
            Agent(told, home, end=lambda: None)

    asyncio.run(start())
