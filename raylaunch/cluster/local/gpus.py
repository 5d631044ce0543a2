"""The GPUs of this machine that this process may use. Ray is imported only for those that are not NVIDIA's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from raylaunch.core.placement import devices
from raylaunch.node.linux import nvml

_CUDA = "CUDA_VISIBLE_DEVICES"
_INDEX = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs by their ids for `variable`, the environment variable that says which GPUs a process may use."""

    variable: str
    ids: tuple[str, ...]


def visible() -> Gpus:
    """Return the GPUs as Ray counts them: the machine's, but no more than the environment names."""
    found = nvml.gpus()
    if not found and has_other_accelerators():
        return _by_ray()
    return Gpus(_CUDA, _allowed(found, os.environ.get(_CUDA)))


def share(gpus: Gpus, mine: tuple[str, ...]) -> Mapping[str, str]:
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
