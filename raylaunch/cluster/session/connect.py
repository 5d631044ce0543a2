"""Find the cluster a run uses and connect to it. Ray is not imported to find out that there is none."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

from raylaunch.cluster.local import local_machine
from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job, RayOptions
from raylaunch.errors import ClusterError

WANTED = "ray>=2.60,<2.61"
"""The same as in the project's metadata, which are missing if raylaunch was copied as a folder."""


def find(options: RayOptions) -> str:
    """Return the address of the cluster to connect to, or `local_machine.LOCAL`, or `local_machine.NONE`.

    Raises ClusterError within seconds if the cluster that `ray.address` or RAY_ADDRESS names cannot be reached.
    """
    if discovery.is_alone(options, os.environ):
        return local_machine.NONE
    return str(_ray_session().find(options))


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Session]:
    """Open a session for the time of a run. Raises ClusterError within seconds."""
    address = find(job.ray)
    if address == local_machine.NONE:
        from raylaunch.cluster.session.local_session import LocalSession  # noqa: PLC0415

        yield LocalSession()
        return
    with _ray_session().connected(job, address) as session:
        yield session


def _ray_session() -> ModuleType:
    """Import what needs Ray, and private parts of it, which other versions do not have."""
    try:
        from raylaunch.cluster.session import ray_session  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        found = importlib.util.find_spec("ray") and importlib.metadata.version("ray")
        msg = f"Ray {found}, which is installed here, cannot be used: {error}" if found else "Ray is not installed here"
        raise ClusterError(msg, hint=f"install `{WANTED}` on all nodes; `ray.address: none` needs no Ray") from None
    return ray_session
