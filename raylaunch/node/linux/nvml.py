"""What NVIDIA's driver says of this machine's GPUs, by NVML (libnvidia-ml) and in the kernel's log. It touches no GPU.

A sick GPU may hold up a call of NVML for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raylaunch.core.text import count

_NVML = "libnvidia-ml.so.1"
_DEVICE = re.compile(r"nvidia\d+")
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([\w:.]+)\): (\d+)", re.MULTILINE)
"""Of a record of the kernel's log, whose third field is its time in microseconds since the machine was started."""
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
_SLOWDOWNS = (
    (0x60, "is slowed down, because it is too hot"),
    (0x80, "is slowed down, because it gets too little power"),
    (0x08, "is slowed down by its hardware"),
)
"""What holds its clocks down (nvmlClocksThrottleReasons in nvml.h), the most telling first. A limit of power that it
has reached, and clocks that a person has set, are no fault.
"""


@dataclass(frozen=True, slots=True)
class Health:
    """What the driver knows of a machine's NVIDIA GPUs. `faults`: for a person, since the driver was loaded."""

    faults: tuple[str, ...] = ()
    slowdowns: tuple[str, ...] = ()
    """Which GPUs are slowed down now, and why."""
    is_not_persistent: bool = False
    """Whether the driver shuts down a GPU that no process uses, so that each start takes seconds."""


@dataclass(frozen=True, slots=True)
class Use:
    """How much of a GPU is used, by all processes. `busy`: per cent of the last second; None: it does not say."""

    used: int
    total: int
    busy: int | None


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


def gpus() -> int:
    """Return the number of NVIDIA GPUs by NVML, which asks the driver and touches no GPU.

    Without NVML, count the files of the devices, of which a container has only its own.
    """
    with _begun() as nvml:
        if nvml is None:
            return sum(_DEVICE.fullmatch(name) is not None for name in os.listdir("/dev"))
        return _asked(nvml, "nvmlDeviceGetCount_v2", ctypes.c_uint()) or 0


def health() -> Health:
    """Return what NVML knows of this machine's GPUs."""
    faults: list[str] = []
    slowdowns: list[str] = []
    modes = []
    with _begun() as nvml:
        if nvml is None:
            return Health()
        for index in range(_asked(nvml, "nvmlDeviceGetCount_v2", ctypes.c_uint()) or 0):
            device = _device(nvml, str(index))
            if device is None:
                faults.append(f"GPU {index} does not answer")
                continue
            faults += [f"GPU {index} {fault}" for fault in _faults(nvml, device)]
            slowdowns += [f"GPU {index} {slowdown}" for slowdown in _slowdowns(nvml, device)]
            modes.append(_asked(nvml, "nvmlDeviceGetPersistenceMode", device, ctypes.c_int()))
    return Health(tuple(faults), tuple(slowdowns), 0 in modes)


def evidence(names: Iterable[str], since: float) -> tuple[str, ...]:
    """Return what is wrong with these GPUs now, and which grave faults the kernel has logged of any since a time.

    `names`: as for `use`. `since`: by CLOCK_MONOTONIC.
    """
    found: list[str] = []
    with _begun() as nvml:
        for name in names:
            if nvml is None:
                break
            device = _device(nvml, name)
            told = ["does not answer"] if device is None else [*_faults(nvml, device), *_slowdowns(nvml, device)]
            found += [f"{f'GPU {name}' if name.isdecimal() else name} {text}" for text in told]
    return (*found, *logged_faults(since=since))


def _faults(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[str]:
    errors = _asked(nvml, "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _VOLATILE, ctypes.c_ulonglong())
    if errors:
        yield f"had {count(errors, 'memory error')} that ECC could not correct"
    _, _, pending, failed = rows = [ctypes.c_uint() for _ in range(4)]
    if _ask(nvml, "nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows)) and (pending.value or failed.value):
        yield "has memory to replace, which needs a reset"
    if _asked(nvml, "nvmlDeviceGetComputeMode", device, ctypes.c_int()) == _PROHIBITED:
        yield "is closed to CUDA (compute mode `prohibited`)"


def _slowdowns(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
    """Return why the clocks are held down, one reason at most. Newer drivers have the function under this name too."""
    reasons = _asked(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.c_ulonglong()) or 0
    return [text for bits, text in _SLOWDOWNS if reasons & bits][:1]


def logged_faults(log: str = "/dev/kmsg", *, since: float = 0.0) -> tuple[str, ...]:
    """Return the grave faults of NVIDIA GPUs in the kernel's log since a time by CLOCK_MONOTONIC, if it may be read."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError), open(os.open(log, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        while True:
            try:
                record = file.read(8192)
            except BrokenPipeError:
                continue  # records were overwritten: the next read returns the oldest left
            if not record:
                break
            for at, place, code in _XID.findall(record):
                if int(code) in _GRAVE and int(at) >= since * 1e6:
                    found[f"Xid {int(code)} at {place.decode()}: {_GRAVE[int(code)]}"] = None
    return tuple(found)


def use(names: Iterable[str]) -> dict[str, Use]:
    """Return how much of these GPUs is used: of those that are there, and say so.

    `names`: as in CUDA_VISIBLE_DEVICES, indices or UUIDs.
    """
    found = {}
    with _begun() as nvml:
        if nvml is None:
            return {}
        for name in names:
            device, memory, rates = _device(nvml, name), _Memory(), _Utilization()
            if device is not None and _ask(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
                knows = _ask(nvml, "nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates))
                found[name] = Use(memory.used, memory.total, int(rates.gpu) if knows else None)
    return found


def _device(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    """Return the handle of a GPU, by its index or UUID; None: it is not there, or does not answer."""
    device = ctypes.c_void_p()
    kind, key = ("Index_v2", int(name)) if name.isdecimal() else ("UUID", name.encode())
    return device if _ask(nvml, f"nvmlDeviceGetHandleBy{kind}", key, ctypes.byref(device)) else None


@contextlib.contextmanager
def _begun() -> Iterator[ctypes.CDLL | None]:
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
