"""The Python environment of `make gpu`: this machine's own, with the wheels of a bundle before it.

It uses the standard library alone, and no pip: a machine with a GPU may have neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "wheels"
"""In a bundle; a checkout has none."""
NEEDED = ("torch", "numpy", "ray", "omegaconf", "yaml", "msgspec", "cloudpickle", "jinja2", "pytest", "pytest_timeout")
_SECONDS = 120.0
_FACTS = """
import importlib.util, json, platform, sys
found = {"python": platform.python_version(), "missing": [], "gpus": []}
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if "torch" not in found["missing"]:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps(found))
"""


class CannotPrepareError(Exception):
    """The wheels are for another Python, or no environment can be made."""


def prepare(folder: Path) -> Path:
    """Return the Python to run everything with: this one, or in a bundle one of an environment made in the folder.

    A virtual environment of a virtual environment does not see the packages of that one, so they are named in a .pth
    file. Raises CannotPrepareError.
    """
    if not WHEELS.is_dir():
        return Path(sys.executable)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if not any(WHEELS.glob(f"ray-*-{tag}-*")):
        msg = f"the wheels in {WHEELS} are not for Python {sys.version_info.major}.{sys.version_info.minor}"
        raise CannotPrepareError(msg)
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        msg = f"`{' '.join(command)}` failed: {done.stdout}{done.stderr}"
        raise CannotPrepareError(msg)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in sorted(WHEELS.iterdir()):
        unpack(path, packages)
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own = {"", str(ROOT), os.getcwd(), *stdlib, *(f"{path}/lib-dynload" for path in stdlib)}
    machine = [path for path in sys.path if path not in own and os.path.isdir(path)]
    (packages / "machine.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in machine))
    return folder / "bin" / "python"


def unpack(path: Path, packages: Path) -> None:
    """Install a wheel, or a package that was packed as a tar file."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(packages)
    else:
        with tarfile.open(path) as packed:
            packed.extractall(packages, filter="data")


def facts(python: Path) -> dict[str, Any]:
    """Return what a Python has: `missing` packages, `gpus` by name, and versions."""
    command = [str(python), "-c", _FACTS, *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        return {"missing": [], "gpus": [], "error": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def driver() -> str:
    """Return the driver and the GPUs as `nvidia-smi` names them; "" without it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """Return what says which machine this is."""
    system = os.uname()
    return {"host": system.nodename, "kernel": system.release, "cpus": len(os.sched_getaffinity(0)), "gpu": driver()}
