"""What there is without a cluster: one machine, which a run has for itself."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from raylaunch.cluster import gpus
from raylaunch.core.job import Job, RayOptions
from raylaunch.core.layout import NodeFacts

LOOPBACK = "127.0.0.1"
"""Where a job on one machine meets: no other machine needs to reach it, and none should."""
NODE_ID = "local"
"""Ray's nodes have numbers; where there is no Ray, this is the one node."""

NONE = "none"
"""The `ray.address` that says so."""
LOCAL = "local"
"""The `ray.address` by which a Ray is to be started in this process."""


def is_alone(options: RayOptions, environ: Mapping[str, str]) -> bool:
    """Whether it is plain that there is no cluster to connect to. Ray, whose import takes long, may find out more."""
    if options.address != "auto":
        return options.address == NONE
    uses_ray = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    return environ.get("RAY_ADDRESS", "") in ("", "auto") and not uses_ray and not _left_by_ray_start(environ).exists()


def _left_by_ray_start(environ: Mapping[str, str]) -> Path:
    """The file in which `ray start` leaves the cluster's address, as Ray's own `get_ray_address_file` has it."""
    return Path(environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp")), "ray", "ray_current_cluster")  # noqa: S108


def facts(job: Job) -> NodeFacts:
    """What it has for the job, nobody else's use of it being known."""
    logical, found = float(cpus(job)), float(len(gpus.visible().ids))
    return NodeFacts(node_id=NODE_ID, address=LOOPBACK, cpus=logical, gpus=found, free_cpus=logical, free_gpus=found)


def cpus(job: Job) -> int:
    """Its logical CPUs: as many as it has, or more where the job wants more, which may run here all the same."""
    each = [int(job.nproc_per_node) if str(job.nproc_per_node).isdecimal() else 1]
    each += [rule.nproc_per_node for rule in job.nodes.values() if rule.nproc_per_node is not None]
    workers = (job.max_nodes + job.spares) * max(each) if job.nprocs is None else job.nprocs
    return max(os.cpu_count() or 1, math.ceil(workers * job.cpus_per_worker))
