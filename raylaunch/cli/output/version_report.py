"""What `raylaunch --version` prints: the versions that a bug report needs, of this machine and Python environment."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
from collections.abc import Mapping
from typing import Any

from raylaunch.worker.selfcheck.versions import nccl, nvidia_driver, system

_ROWS = {
    "raylaunch": ("raylaunch", "unknown"),
    "python": ("Python", ""),
    "torch": ("torch", "not installed"),
    "cuda": ("CUDA", "not in this torch"),
    "nccl": ("NCCL", "not in this torch"),
    "nvidia_driver": ("NVIDIA driver", "not installed"),
    "ray": ("Ray", "not installed"),
    "omegaconf": ("omegaconf", "not installed"),
    "os": ("OS", ""),
    "kernel": ("kernel", ""),
}
"""The key of each version in JSON, its name in the text, and what the text says where it is missing."""


def text(found: Mapping[str, str | None]) -> str:
    """Return the versions as lines of text. The first one, `raylaunch 0.1.0`, has a single space for programs."""
    width = max(len(name) for name, _ in _ROWS.values())
    lines = [f"{name:{width}} {found[key] or missing}" for key, (name, missing) in _ROWS.items()]
    return "\n".join([" ".join(lines[0].split()), *lines[1:]]) + "\n"


def as_json(found: Mapping[str, str | None]) -> str:
    """Return the versions as a JSON object, indented; null: it is missing."""
    return json.dumps(found, indent=2) + "\n"


def versions() -> dict[str, str | None]:
    """Return the version of everything that is listed; None: it is not installed, or torch lacks it.

    The metadata of installed packages and files of torch are read, since importing torch and Ray takes seconds. Only
    where a torch with CUDA brings its NCCL along in no package (as from conda), torch is imported and asked.
    """
    torch = _version_module_of_torch()
    hip = torch.get("hip")
    return {
        "raylaunch": _installed("raylaunch"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": _installed("torch") or torch.get("__version__"),
        "cuda": f"ROCm {hip}" if hip else torch.get("cuda"),
        "nccl": (_installed_nccl() or nccl()) if torch.get("cuda") or hip else None,
        "nvidia_driver": nvidia_driver() or None,
        "ray": _installed("ray"),
        "omegaconf": _installed("omegaconf"),
        "os": system(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_nccl() -> str | None:
    """Return the version of the package with NCCL that pip installs with torch, such as `nvidia-nccl-cu12`."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.lower().replace("_", "-").startswith("nvidia-nccl-"):
            return package.version
    return None


def _version_module_of_torch() -> dict[str, Any]:
    """Return what the module `torch.version` defines, without importing torch; {} if it cannot be read."""
    with contextlib.suppress(Exception):  # whatever is broken there is what the bug report is about
        spec = importlib.util.find_spec("torch")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            return runpy.run_path(os.path.join(folder, "version.py"))
    return {}
