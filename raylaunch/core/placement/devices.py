"""Which GPUs of its node a worker has, and the environment variables that name GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

VARIABLES = (
    *("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    *("NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS", "FURIOSA_DEVICES", "QBRUNTIME_VISIBLE_DEVICES"),
    *("RBLN_DEVICES", "TT_VISIBLE_DEVICES"),
)
"""The variables that torch and Ray's accelerators read, HIP's before CUDA's."""
_CUDA = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """How much of a worker's GPU is used, by whatever process, rounded so that small changes need no report."""

    rank: int
    gpu: str
    """Its index or UUID, as CUDA_VISIBLE_DEVICES has it."""
    used: int
    total: int
    """Bytes of its memory."""
    busy: int | None = None
    """In how much of the time it runs a kernel, in per cent; None: it does not say."""


def indices(local_rank: int, nproc: int, gpus_per_worker: float) -> range:
    """Return the indices of a worker's GPUs on its node, which has GPUs for this number of workers.

    Workers with parts of GPUs are divided among them. Without GPUs the range is empty, and begins at the local rank.
    """
    if not gpus_per_worker:
        return range(local_rank, local_rank)
    gpus = math.ceil(round(gpus_per_worker * nproc, 4))  # as many as a bundle has
    first = local_rank * gpus // nproc
    return range(first, max(first + 1, (local_rank + 1) * gpus // nproc))


def cuda_names(found: range, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of NVIDIA's GPUs with these indices, where `environ` says which GPUs the node has."""
    listed = environ.get(_CUDA)
    visible = [name.strip() for name in listed.split(",")] if listed is not None else []
    return tuple(map(str, found)) if listed is None else tuple(visible[found.start : found.stop])


def naming(variable: str, ids: Iterable[str]) -> dict[str, str]:
    """Return the variable by which a process is told these GPUs. Intel's selector names their driver too."""
    return {variable: ("level_zero:" if variable == "ONEAPI_DEVICE_SELECTOR" else "") + ",".join(ids)}


def own(found: range, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a worker sees only its own GPUs, the first as number 0: `--virtual-local-rank`.

    `found`: their indices in the list that `environ` has; if it is empty, the worker gets one GPU, as under torchrun.
    On ROCm, HIP_VISIBLE_DEVICES comes before CUDA_VISIBLE_DEVICES, as for torchrun from torch 2.15 on. Raise ValueError
    where `environ` names too few.
    """
    name = next((name for name in VARIABLES if name in environ), _CUDA)
    kind, colon, listed = environ.get(name, "").rpartition(":")  # such as `level_zero:0,1`
    wanted = found or range(found.start, found.start + 1)
    if name not in environ:
        value = ",".join(map(str, wanted))
    elif not listed:
        return {}
    elif wanted.stop > len(visible := [device.strip() for device in listed.split(",")]):
        msg = f"`virtual_local_rank` needs {wanted.stop} GPUs for its workers, and {name} is {environ[name]}"
        raise ValueError(msg)
    else:
        value = kind + colon + ",".join(visible[index] for index in wanted)
    return {name: value} | ({_CUDA: value} if name == VARIABLES[0] else {})
