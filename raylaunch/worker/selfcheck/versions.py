"""What this rank's node is and has: read, never asked of another process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import socket

from raylaunch.core.surroundings import Surroundings

_STEERING = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_DRIVER = "/proc/driver/nvidia/version"


def surroundings() -> Surroundings:
    """Where the rank that calls it runs."""
    return Surroundings(
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        address=_own_address(),
        versions=versions(),
        env={name: value for name, value in sorted(os.environ.items()) if name.startswith(_STEERING)},
    )


def versions() -> dict[str, str]:
    """What is installed here; what is not there has no entry."""
    import torch  # noqa: PLC0415

    found = {"python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name(0)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["driver"] = _driver()
    for package in ("raylaunch", "ray", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["system"] = _system()
    found["kernel"] = platform.release()
    return {name: version for name, version in found.items() if version}


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return platform.system()


def _driver() -> str:
    """The NVIDIA driver's version: the first number with dots in what the kernel says of it."""
    with contextlib.suppress(OSError), open(_DRIVER, encoding="utf-8", errors="replace") as file:
        number = re.search(r"\d+\.\d[\d.]*", file.readline())
        return number[0] if number else ""
    return ""


def _own_address() -> str:
    """The address that a packet to rank 0's node would bear; none is sent."""
    with contextlib.suppress(OSError, ValueError):
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for family, kind, _, _, address in socket.getaddrinfo(*where, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "address unknown"


def lacks() -> dict[str, str]:
    """Why this rank cannot use a backend, for each that torch knows; empty where it can."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    devices = {"nccl": torch.cuda.is_available, "xccl": torch.xpu.is_available}
    found = {}
    for name in ("gloo", "nccl", "xccl", "ucc"):
        if not dist.is_backend_available(name):
            found[name] = "this torch does not have it"
        elif name in devices and not devices[name]():
            found[name] = "there is no device for it"
        else:
            found[name] = ""
    found["mpi"] = "only `mpirun` can start its ranks"
    return found


def gpu() -> str:
    """Which GPU this rank would use; empty where there is none."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return ""
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(index).uuid}"
