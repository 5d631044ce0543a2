"""Where a run takes place: a Ray cluster, or this machine alone. No Ray is imported to find out that there is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from raylaunch.cluster import here
from raylaunch.cluster.session import Session
from raylaunch.core.job import Job, RayOptions


def find(options: RayOptions) -> str:
    """The address of the cluster to connect to, `here.LOCAL` or `here.NONE`. Raises ClusterError within seconds."""
    if here.is_alone(options, os.environ):
        return here.NONE
    from raylaunch.cluster import ray_session  # noqa: PLC0415

    return ray_session.find(options)


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Session]:
    """For the time of the run. Raises ClusterError within seconds."""
    address = find(job.ray)
    if address == here.NONE:
        from raylaunch.cluster.local_session import LocalSession  # noqa: PLC0415

        yield LocalSession()
        return
    from raylaunch.cluster import ray_session  # noqa: PLC0415

    with ray_session.connected(job, address) as session:
        yield session
