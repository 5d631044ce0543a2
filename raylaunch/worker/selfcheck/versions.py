"""Reads what this rank's node has: versions, variables, address, backends, GPU. No other process is asked."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import socket

from raylaunch.worker.selfcheck.findings import RankEnvironment

_BACKEND_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_OF_THE_NODE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""raylaunch sets it, to a path that is another one on each node."""
_NVIDIA_VERSION_FILE = "/proc/driver/nvidia/version"


def rank_environment() -> RankEnvironment:
    """Return where this rank runs, and what is installed there."""
    return RankEnvironment(
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        address=_own_address(),
        versions=versions(),
        env={name: os.environ[name] for name in sorted(os.environ) if _is_of_a_backend(name)},
    )


def _is_of_a_backend(name: str) -> bool:
    return name.startswith(_BACKEND_PREFIXES) and name != _OF_THE_NODE


def versions() -> dict[str, str]:
    """Return the versions of what is installed; what is missing has no entry."""
    import torch  # noqa: PLC0415

    found = {"python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name(0)
        found["nccl"] = nccl()
    found["driver"] = nvidia_driver()
    for package in ("raylaunch", "ray", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["system"] = system()
    found["kernel"] = platform.release()
    return {name: version for name, version in found.items() if version}


def nccl() -> str | None:
    """Return the version of the NCCL that torch uses; None: torch cannot be imported or has none."""
    with contextlib.suppress(Exception):
        import torch  # noqa: PLC0415

        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def system() -> str:
    """Return the name of the Linux distribution, or "Linux" where no file says it."""
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return platform.system()


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver, or "" without one: the first number with dots in its file in /proc."""
    with contextlib.suppress(OSError), open(_NVIDIA_VERSION_FILE, encoding="utf-8", errors="replace") as file:
        number = re.search(r"\d+\.\d[\d.]*", file.readline())
        return number[0] if number else ""
    return ""


def _own_address() -> str:
    """Return the source address of packets to rank 0's node (`connect` of a UDP socket sends none)."""
    with contextlib.suppress(OSError, ValueError):
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for family, kind, _, _, address in socket.getaddrinfo(*where, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "address unknown"


def backend_problems() -> dict[str, str]:
    """Return why this rank cannot use a backend, for each backend that torch knows; `""` where it can."""
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


def gpu_id() -> str:
    """Return host and UUID of the GPU that this rank uses; `""` where there is none."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return ""
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(index).uuid}"
