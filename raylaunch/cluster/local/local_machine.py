"""The machine itself as the only node of a run: without Ray, or with a Ray that this process starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement import devices
from raylaunch.core.placement.plan import NodeFacts
from raylaunch.node.linux import nvml

_CUDA = "CUDA_VISIBLE_DEVICES"
_INDEX = re.compile(r"-?\d+")
LOOPBACK = "127.0.0.1"
"""The node's address if there is only one: no other machine needs to reach its store, and none should."""
HOST_ID = HostId("local")
"""The id of the only node of a run without Ray."""
NONE = "none"
"""The `ray.address` of a run without Ray."""
LOCAL = "local"
"""The `ray.address` of a run for which this process starts Ray."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs by their ids for `variable`, the environment variable that says which GPUs a process may use."""

    variable: str
    ids: tuple[str, ...]


def visible_gpus() -> Gpus:
    """Return the GPUs as Ray counts them: the machine's, but no more than the environment names."""
    found = nvml.gpus()
    if not found and has_other_accelerators():
        return _by_ray()
    return Gpus(_CUDA, _allowed(found, os.environ.get(_CUDA)))


def gpus_environ(gpus: Gpus, mine: tuple[str, ...]) -> Mapping[str, str]:
    """Return the environment of processes that may use only the GPUs `mine`; empty if `mine` is all of them or none."""
    return devices.naming(gpus.variable, mine) if 0 < len(mine) < len(gpus.ids) else {}


def _allowed(number: int, named: str | None) -> tuple[str, ...]:
    """Return the ids that CUDA takes: it ignores what follows an index that no GPU has, such as -1."""
    if named is None:
        return tuple(map(str, range(number)))
    names = [] if named in ("", "NoDevFiles") else [name.strip() for name in named.split(",")]
    wrong = (at for at, name in enumerate(names) if _INDEX.fullmatch(name) and not 0 <= int(name) < number)
    return tuple(names[: min(number, next(wrong, number))])


def has_other_accelerators() -> bool:
    """Return whether there may be GPUs of AMD, Intel or MetaX, which Ray knows how to count."""
    return os.path.exists("/dev/kfd") or any(find_spec(module) is not None for module in ("dpctl", "pymxsml"))


def _by_ray() -> Gpus:
    from raylaunch.cluster import ray_internals  # noqa: PLC0415

    variable, number, named = ray_internals.accelerators()
    ids = map(str, range(number)) if named is None else named[:number]
    return Gpus(variable or _CUDA, tuple(ids))


def facts(job: Job) -> NodeFacts:
    """Return this machine's resources for the job. All count as free, since nothing is known of other users."""
    logical, found = float(cpus(job)), float(len(visible_gpus().ids))
    return NodeFacts(node_id=HOST_ID, address=LOOPBACK, cpus=logical, gpus=found, free_cpus=logical, free_gpus=found)


def cpus(job: Job) -> int:
    """Return the logical CPUs of this machine: as many as it has, or as the job wants if that is more."""
    given = str(job.nproc_per_node)
    each = [int(given) if given.isdecimal() else 1 if given == "cpu" else len(visible_gpus().ids)]
    each += [rule.nproc_per_node for rule in job.nodes.values() if rule.nproc_per_node is not None]
    workers = (job.max_nodes + job.spares) * max(each) if job.nprocs is None else job.nprocs
    return max(os.cpu_count() or 1, math.ceil(workers * job.cpus_per_worker))
