"""The specification of a worker, made from that of its node."""

from __future__ import annotations

import pytest

from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.node.protocol.node_spec import NodeSpec, WorkerTemplate


@pytest.mark.parametrize("nhosts", [1, 2])
def test_the_interface_is_told_only_in_a_world_of_several_hosts(nhosts):
    """A world may span several hosts in one attempt, and not in the next."""
    template = WorkerTemplate(
        run_dir="/runs", kind="command", target="true", args=(), env={}, backend=None, preload=(), start_method="fork"
    )
    spec = NodeSpec(
        template=template,
        node="node-1",
        address="10.0.0.7",
        env={"A": "1"},
        interface_env={"GLOO_SOCKET_IFNAME": "eth0"},
        cwd="/",
        run_dir="/runs",
        page="/page",
    )
    part = Assignment(
        attempt=1, node="node-1", node_rank=0, nnodes=2, base_rank=0, nproc=1, world_size=2, nhosts=nhosts
    )
    meeting = Rendezvous(master_addr="10.0.0.7", master_port=1, run_id="run", max_restarts=0, restart_count=0)
    env = spec.worker(part, 0, meeting).env
    assert env["A"] == "1"
    assert env.get("GLOO_SOCKET_IFNAME") == ("eth0" if nhosts > 1 else None)
