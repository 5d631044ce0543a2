"""What a person is told of nodes, once."""

from __future__ import annotations

from dataclasses import replace

from raylaunch.cluster.driver.driver import NodeWarnings
from raylaunch.core.job.job import StartMethod
from raylaunch.core.newtypes import HostId
from raylaunch.node.protocol.node_status import AgentReady, Ready

READY = Ready(pid=1, torch=True, start_method=StartMethod.FORKSERVER, why=())


def test_nodes_that_share_a_host_have_one_thread_for_each_worker() -> None:
    """It is said once, and not where the number of threads is set."""
    said: list[str] = []
    warnings = NodeWarnings(said.append)
    up = AgentReady(host=HostId("a"), address="10.0.0.1", nproc=1, ready=READY)
    warnings.came_up(up, several_hosts=False, shares_host=False)
    warnings.came_up(replace(up, threads="4"), several_hosts=False, shares_host=True)
    assert said == []
    for _ in range(3):
        warnings.came_up(up, several_hosts=False, shares_host=True)
    (text,) = said
    assert text.startswith("nodes share a host, so each worker has one OpenMP thread")
