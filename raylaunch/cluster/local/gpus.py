"""The GPUs of this machine that this process may use. Ray is imported only for those that are not NVIDIA's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from raylaunch.core.placement import devices
from raylaunch.core.text import count

_NVML = "libnvidia-ml.so.1"
_CUDA = "CUDA_VISIBLE_DEVICES"
_INDEX = re.compile(r"-?\d+")
_DEVICE = re.compile(r"nvidia\d+")
_XID = re.compile(rb"NVRM: Xid \(PCI:([\w:.]+)\): (\d+)")
_GRAVE = {
    48: "memory error that ECC could not correct",
    63: "memory to replace at the next reset",
    64: "memory that could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "memory error that ended one program",
    95: "memory error that may have reached others",
}
"""Errors of the driver after which a GPU is not to be trusted (NVIDIA, `Xid Errors`)."""
_UNCORRECTED, _VOLATILE, _PROHIBITED = 1, 0, 2
"""Of nvml.h: NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC and NVML_COMPUTEMODE_PROHIBITED."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs by their ids for `variable`, the environment variable that says which GPUs a process may use."""

    variable: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """What the driver knows of a machine's NVIDIA GPUs. `faults`: for a person, since the driver was loaded."""

    faults: tuple[str, ...] = ()
    is_not_persistent: bool = False
    """Whether the driver shuts down a GPU that no process uses, so that each start takes seconds."""


def visible() -> Gpus:
    """Return the GPUs as Ray counts them: the machine's, but no more than the environment names."""
    found = nvidia_gpus()
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


def nvidia_gpus() -> int:
    """Return the number of NVIDIA GPUs by NVML, which asks the driver and touches no GPU.

    Without NVML, count the files of the devices, of which a container has only its own.
    """
    with _nvml() as nvml:
        if nvml is None:
            return sum(_DEVICE.fullmatch(name) is not None for name in os.listdir("/dev"))
        return _asked(nvml, "nvmlDeviceGetCount_v2", ctypes.c_uint()) or 0


def nvidia_health() -> Health:
    """Return what NVML knows of this machine's GPUs."""
    faults, modes = [], []
    with _nvml() as nvml:
        if nvml is None:
            return Health()
        for index in range(_asked(nvml, "nvmlDeviceGetCount_v2", ctypes.c_uint()) or 0):
            device = ctypes.c_void_p()
            if _ask(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device)):
                faults += [f"GPU {index} {fault}" for fault in _faults(nvml, device)]
                modes.append(_asked(nvml, "nvmlDeviceGetPersistenceMode", device, ctypes.c_int()))
            else:
                faults.append(f"GPU {index} does not answer")
    return Health(tuple(faults), 0 in modes)


def _faults(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[str]:
    errors = _asked(nvml, "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _VOLATILE, ctypes.c_ulonglong())
    if errors:
        yield f"had {count(errors, 'memory error')} that ECC could not correct"
    _, _, pending, failed = rows = [ctypes.c_uint() for _ in range(4)]
    if _ask(nvml, "nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows)) and (pending.value or failed.value):
        yield "has memory to replace, which needs a reset"
    if _asked(nvml, "nvmlDeviceGetComputeMode", device, ctypes.c_int()) == _PROHIBITED:
        yield "is closed to CUDA (compute mode `prohibited`)"


def logged_faults(log: str = "/dev/kmsg") -> tuple[str, ...]:
    """Return the grave faults of NVIDIA GPUs in the kernel's log since the machine was started, if it may be read."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError), open(os.open(log, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        while True:
            try:
                record = file.read(8192)
            except BrokenPipeError:
                continue  # records were overwritten: the next read returns the oldest left
            if not record:
                break
            for place, code in _XID.findall(record):
                if int(code) in _GRAVE:
                    found[f"Xid {int(code)} at {place.decode()}: {_GRAVE[int(code)]}"] = None
    return tuple(found)


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Begin NVML; None: this machine has none."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        yield None
        return
    is_up = nvml.nvmlInit_v2() == 0
    try:
        yield nvml
    finally:
        if is_up:
            nvml.nvmlShutdown()


def _ask(nvml: ctypes.CDLL, name: str, *args: Any) -> bool:
    """Call a function of NVML, which an older one may lack. Return whether it succeeds."""
    return hasattr(nvml, name) and getattr(nvml, name)(*args) == 0


def _asked(nvml: ctypes.CDLL, name: str, *args: Any) -> int | None:
    """Return the number that a function of NVML puts into its last argument; None: it is not known."""
    return int(args[-1].value) if _ask(nvml, name, *args[:-1], ctypes.byref(args[-1])) else None


def has_other_accelerators() -> bool:
    """Return whether there may be GPUs of AMD, Intel or MetaX, which Ray knows how to count."""
    return os.path.exists("/dev/kfd") or any(find_spec(module) is not None for module in ("dpctl", "pymxsml"))


def _by_ray() -> Gpus:
    from raylaunch.cluster import ray_internals  # noqa: PLC0415

    variable, number, named = ray_internals.accelerators()
    ids = map(str, range(number)) if named is None else named[:number]
    return Gpus(variable or _CUDA, tuple(ids))
