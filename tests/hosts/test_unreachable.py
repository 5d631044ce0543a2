"""Two hosts that cannot reach each other, though the driver reaches both: one of them is left out."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import STEPS
from tests.hosts.steps import hosts_by_rank, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TOGETHER = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + STEPS.replace(
    "time.sleep(0.02)", "dist.all_reduce(torch.ones(1)); time.sleep(0.02)"
)


def test_one_of_two_hosts_is_left_out_after_a_cut_on_the_way_between_them(launcher, hosts):
    """Packets of one to the other are lost while both train. No restart is spent."""
    job = {"nnodes": "2:3", "last_call": 100, "max_restarts": 0, "hang_timeout": 10, "preload": ["torch"]}
    run = launcher.start(TOGETHER, **job)
    first = run.wait_for_world(3)  # which is the first: ranks are in the order of the hosts, and the head has rank 0
    one, other = (next(host for host in hosts.hosts if host.name == name) for name in hosts_by_rank(run, first)[1:])
    hosts.cut(other, to=one)
    second = run.wait_for_world(2, after=first)
    assert never_two_worlds(run)
    left = hosts_by_rank(run, second)
    assert left[0] == hosts_by_rank(run, first)[0], "the host of rank 0 is not left out"
    (cordoned,) = run.actions("Cordon")
    assert cordoned["host"] in (one.node_id, other.node_id)
    pair = {f"{node} ({host.address})" for host in (one, other) for node in run.nodes_on(host)}
    assert set(cordoned["why"].partition(" cannot reach each other: ")[0].split(" and ")) == pair
    run.stop()
    assert run.result["exit_code"] == 130
    assert cordoned["why"] in run.err
