"""Where a run takes place: a Ray cluster, or this machine alone. No Ray is imported to find out that there is none."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

from raylaunch.cluster import here
from raylaunch.cluster.session import Session
from raylaunch.core.job import Job, RayOptions
from raylaunch.errors import ClusterError

WANTED = "ray>=2.60,<2.61"
"""As the project's own metadata have it, which say nothing where raylaunch came as a folder."""


def find(options: RayOptions) -> str:
    """The address of the cluster to connect to, `here.LOCAL` or `here.NONE`. Raises ClusterError within seconds."""
    if here.is_alone(options, os.environ):
        return here.NONE
    return str(_ray_session().find(options))


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Session]:
    """For the time of the run. Raises ClusterError within seconds."""
    address = find(job.ray)
    if address == here.NONE:
        from raylaunch.cluster.local_session import LocalSession  # noqa: PLC0415

        yield LocalSession()
        return
    with _ray_session().connected(job, address) as session:
        yield session


def _ray_session() -> ModuleType:
    """What needs Ray: also parts of it that are private, which another version has elsewhere, or not at all."""
    try:
        from raylaunch.cluster import ray_session  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        found = importlib.util.find_spec("ray") and importlib.metadata.version("ray")
        msg = f"Ray {found}, which is installed here, cannot be used: {error}" if found else "Ray is not installed here"
        raise ClusterError(msg, hint=f"install `{WANTED}` on all nodes; `ray.address: none` needs no Ray") from None
    return ray_session
