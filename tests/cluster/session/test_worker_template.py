"""What the driver decides for all workers: the backend of functions, and how many GPUs each has."""

from __future__ import annotations

import pytest

from raylaunch.cluster.session.worker_template import worker_template
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.placement.packing import NodeFacts
from raylaunch.core.placement.plan import make_plan


@pytest.mark.parametrize(
    ("gpus", "settings", "backend", "each"),
    [
        ([8], {"nproc_per_node": 8}, None, 1),
        ([8], {"nproc_per_node": 16}, "gloo", 0),
        ([1], {"nproc_per_node": 4}, "gloo", 0),
        ([8], {"nproc_per_node": 8, "gpus_per_worker": 0}, "gloo", 0),
        ([1], {"nproc_per_node": 2, "gpus_per_worker": 0.5}, "gloo", 0.5),
        ([8], {"nproc_per_node": 4, "gpus_per_worker": 2}, None, 2),
        ([8, 0], {"nproc_per_node": 2, "nnodes": 2, "gpus_per_worker": 0}, "gloo", 0),
        ([8, 0], {"nprocs": 2, "nnodes": 1}, None, 1),
        ([1], {"nproc_per_node": 2, "gpus_per_worker": 0, "backend": "nccl"}, "nccl", 0),
    ],
)
def test_the_backend_of_functions(gpus, settings, backend, each):
    """nccl needs a GPU for each rank, whatever GPUs a worker may see. None: that of the device, nccl for CUDA."""
    nodes = [
        NodeFacts(node_id=f"id-{number}", address=f"10.0.0.{number}", cpus=32, gpus=has, free_cpus=32, free_gpus=has)
        for number, has in enumerate(gpus)
    ]
    job = Job(entrypoint=Entrypoint(function="work:train"), **settings)
    plan = make_plan(job, nodes, local=False)
    found = worker_template(job, plan, "/runs", payload=b"", terminal=None, on_cluster=True)
    assert (found.backend, found.gpus_per_worker) == (backend, each)
