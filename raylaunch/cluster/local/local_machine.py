"""The machine itself as the only node of a run: without Ray, or with a Ray that this process starts."""

from __future__ import annotations

import math
import os

from raylaunch.cluster.local import gpus
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.plan import NodeFacts

LOOPBACK = "127.0.0.1"
"""The node's address if there is only one: no other machine needs to reach its store, and none should."""
HOST_ID = HostId("local")
"""The id of the only node of a run without Ray."""

NONE = "none"
"""The `ray.address` of a run without Ray."""
LOCAL = "local"
"""The `ray.address` of a run for which this process starts Ray."""


def facts(job: Job) -> NodeFacts:
    """Return this machine's resources for the job. All count as free, since nothing is known of other users."""
    logical, found = float(cpus(job)), float(len(gpus.visible().ids))
    return NodeFacts(node_id=HOST_ID, address=LOOPBACK, cpus=logical, gpus=found, free_cpus=logical, free_gpus=found)


def cpus(job: Job) -> int:
    """Return the logical CPUs of this machine: as many as it has, or as the job wants if that is more."""
    given = str(job.nproc_per_node)
    each = [int(given) if given.isdecimal() else 1 if given == "cpu" else len(gpus.visible().ids)]
    each += [rule.nproc_per_node for rule in job.nodes.values() if rule.nproc_per_node is not None]
    workers = (job.max_nodes + job.spares) * max(each) if job.nprocs is None else job.nprocs
    return max(os.cpu_count() or 1, math.ceil(workers * job.cpus_per_worker))
