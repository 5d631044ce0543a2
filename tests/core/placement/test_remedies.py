"""Why a job has too few nodes, and with which other settings it could start now."""

from __future__ import annotations

from itertools import product

import pytest
from machine_helpers import job

from raylaunch.core.job.job import NodeRule
from raylaunch.core.placement.plan import NodeFacts, Plan, make_plan


def node(last: int, *, cpus: float = 8, gpus: float = 0, free_cpus: float | None = None) -> NodeFacts:
    """Return facts of a node at 10.0.0.<last>, all of whose GPUs are free."""
    free = cpus if free_cpus is None else free_cpus
    return NodeFacts(
        node_id=f"id-{last}", address=f"10.0.0.{last}", cpus=cpus, gpus=gpus, free_cpus=free, free_gpus=gpus
    )


def plan(*nodes: NodeFacts, local: bool = False, **settings: object) -> Plan:
    return make_plan(job(**settings), nodes, local=local)


def test_a_node_of_its_own_for_each():
    """One node has room for both agents, or the job begins with one; no other number of CPUs or workers would help."""
    found = plan(node(1), nnodes=2, nproc_per_node=2)
    assert found.obstacles == ("2 different Ray nodes are needed, and there is 1",)
    assert found.remedies == ("placement=pack", "nnodes=1:2")
    assert plan(node(1), node(2), nnodes=3).obstacles == ("3 different Ray nodes are needed, and there are 2",)


def test_whole_cpus_are_preferred():
    """From 1 on a worker gets whole ones, below tenths; the most that fits."""
    assert "cpus_per_worker=4" in plan(node(1, cpus=9), nnodes=1, nproc_per_node=2, cpus_per_worker=5).remedies
    assert "cpus_per_worker=0.8" in plan(node(1, cpus=5), nnodes=1, nproc_per_node=6).remedies
    assert "cpus_per_worker=0" in plan(node(1, free_cpus=0), nnodes=1, nproc_per_node=6).remedies


def test_gpus_are_not_taken_away():
    """Fewer workers, each with its own."""
    found = plan(node(1, cpus=96, gpus=4), nnodes=1, nproc_per_node=8, gpus_per_worker=1)
    assert found.remedies == ("nproc_per_node=4",)
    assert not found.lacks_gpus


def test_gpus_that_no_node_has():
    """Nothing would help, and waiting would not either."""
    found = plan(node(1), nnodes=1, nproc_per_node=2, gpus_per_worker=1)
    assert found.obstacles == ("the job needs GPUs, and no node of the cluster has any",)
    assert (found.lacks_gpus, found.remedies) == (True, ())
    assert found.advice == found.obstacles
    assert not plan(node(1), nnodes=1, nproc_per_node=2).lacks_gpus


def test_nothing_helps():
    """In a cluster without nodes, or where no workers are meant for any."""
    assert plan(nnodes=2, nproc_per_node=1).advice == ()
    assert plan(node(1), nnodes=2, nodes={"10.*": NodeRule(nproc_per_node=0)}).remedies == ()


def test_one_remedy_alone():
    """Without an `or`."""
    found = plan(node(1, cpus=96, gpus=4), nnodes=1, nproc_per_node=8, gpus_per_worker=1)
    assert found.advice == ("it could start now with `nproc_per_node=4`",)


def test_a_job_with_room_needs_no_advice():
    assert plan(node(1), node(2), nproc_per_node=2).advice == ()


CLUSTERS = {
    "equal": (node(1), node(2)),
    "one is busy": (node(1), node(2, free_cpus=0.5)),
    "small and large": (node(1, cpus=2), node(2, cpus=64)),
    "three": (node(1, cpus=4), node(2, cpus=4, free_cpus=3), node(3, cpus=4, free_cpus=1)),
    "with GPUs": (node(1, gpus=4), node(2, gpus=2)),
}
JOBS = [
    *({"nnodes": nodes, "nproc_per_node": workers} for nodes, workers in product((2, 3, "2:4"), (2, 5, 12, "auto"))),
    *({"nnodes": nodes, "nprocs": workers} for nodes, workers in product((1, 3), (5, 20, 200))),
    {"nnodes": 4, "nproc_per_node": 2, "cpus_per_worker": 3, "placement": "pack"},
    {"nnodes": 2, "nproc_per_node": 4, "gpus_per_worker": 1},
]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_each_remedy_helps(cluster):
    """The job with the setting that is named has room, in all clusters and jobs of these tables."""
    nodes = CLUSTERS[cluster]
    for settings in JOBS:
        found = plan(*nodes, **settings)
        for remedy in found.remedies:
            key, _, value = remedy.partition("=")
            changed: object = value
            if key in ("cpus_per_worker", "nproc_per_node", "nprocs"):
                changed = float(value) if key == "cpus_per_worker" else int(value)
            assert plan(*nodes, **settings | {key: changed}).feasible, (settings, remedy)
