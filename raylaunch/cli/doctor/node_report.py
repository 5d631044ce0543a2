"""Collects the facts of one node. It runs on every node, in a task of Ray, and takes seconds at most."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from raylaunch.cli.output import version_report
from raylaunch.node.linux import nvml

_Answer = TypeVar("_Answer")

_MOST_SECONDS = 3.0
"""How long a look-up or a file system may take."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What a node is asked of. Paths are absolute; "" is not asked."""

    script: str = ""
    module: str = ""
    command: str = ""
    cwd: str = ""
    """The folder in which workers run."""
    marker: str = ""
    """A file that this command has made in the folder of runs."""
    log_dir: str = ""
    door: tuple[str, int] = ("", 0)
    """Address and port at which this command listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The facts of one node. Sizes are in bytes, times in seconds; None: not known."""

    versions: Mapping[str, str | None] = field(default_factory=dict)
    shared_memory: int | None = None
    """Size of /dev/shm."""
    temporary: int | None = None
    """What is free in the folder for temporary files."""
    open_files: int | None = None
    """How many files a process may open; None: as many as it likes."""
    locked_memory: int | None = None
    """How much memory a process may lock; None: as much as it likes."""
    has_core_files: bool = False
    """Whether the memory of a process that crashes becomes a file, however large it is."""
    has_infiniband: bool = False
    name_seconds: float = 0.0
    """How long it takes to find the name of the node's own address."""
    program: str = ""
    """The digest of the script, or the path of the module or the command; "": it is not there, or was not asked."""
    has_folder: bool = True
    """Whether the folder is there in which workers run."""
    sees_marker: bool = True
    """Whether the folder of runs is the one that this command has."""
    log_dir_problem: str = ""
    """Why no run folder can be made here."""
    door_problem: str = ""
    """Why this command cannot be reached from here."""
    gpu_processes: int = 0
    """How many processes use its GPUs; 0 also if that is not known."""
    nvidia_gpus: int = 0
    """How many NVIDIA GPUs its driver has."""
    gpu_health: nvml.Health = field(default_factory=nvml.Health)
    logged_gpu_faults: tuple[str, ...] = ()
    """What its kernel has logged of them since it was started."""


def report(questions: Questions) -> NodeReport:
    """Return the facts of this node."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_folder = not questions.cwd or _bounded(lambda: os.path.isdir(questions.cwd), False)
    return NodeReport(
        versions=version_report.versions(),
        shared_memory=_space(_SHARED_MEMORY, "total"),
        temporary=_space(tempfile.gettempdir(), "free"),
        open_files=None if files == resource.RLIM_INFINITY else files,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        has_core_files=_has_core_files(),
        has_infiniband=os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        name_seconds=_seconds(lambda: socket.gethostbyaddr(_own_address(questions.door[0]))),
        program=_bounded(lambda: _program(questions), ""),
        has_folder=has_folder,
        sees_marker=not questions.marker or _bounded(lambda: os.path.exists(questions.marker), False),
        log_dir_problem=_bounded(lambda: log_dir_problem(questions.log_dir), "its file system does not answer"),
        door_problem=_door_problem(questions.door),
        gpu_processes=_gpu_processes(),
        nvidia_gpus=_bounded(nvml.gpus, 0),
        gpu_health=_bounded(nvml.health, nvml.Health(("the driver does not answer",))),
        logged_gpu_faults=_bounded(nvml.logged_faults, ()),
    )


def _has_core_files() -> bool:
    pattern = "|"
    with contextlib.suppress(OSError):  # a sandbox may have no such file
        pattern = Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8")
    is_unlimited = resource.getrlimit(resource.RLIMIT_CORE)[0] == resource.RLIM_INFINITY
    return is_unlimited and not pattern.startswith("|")  # a program has a limit of its own


def _bounded(ask: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return an answer, or another one if it takes too long: a file system may not answer."""
    found: list[_Answer] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    return found[0] if found else otherwise


def _seconds(ask: Callable[[], object]) -> float:
    """Return how long something takes, whether it succeeds or not; the most that is waited for if it takes longer."""

    def timed() -> float:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            ask()
        return time.monotonic() - began

    return _bounded(timed, _MOST_SECONDS)


def _space(folder: str, which: str) -> int | None:
    """Return how many bytes its file system has. `which`: `total` or `free`."""

    def ask() -> int | None:
        with contextlib.suppress(OSError):
            return int(getattr(shutil.disk_usage(folder), which))
        return None

    return _bounded(ask, None)


def _own_address(other: str) -> str:
    """Return the source address of packets to another host. No packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((other or "192.0.2.1", 9))
        return str(sock.getsockname()[0])
    return "127.0.0.1"


def _program(questions: Questions) -> str:
    if questions.script:
        path = Path(questions.script)
        path = path / "__main__.py" if path.is_dir() else path
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            return ""
    if questions.command:
        return shutil.which(os.path.join(questions.cwd, questions.command)) or shutil.which(questions.command) or ""
    if not questions.module:
        return ""
    name = questions.module.partition(".")[0]  # to find a module in a package would import the package
    sys.path.insert(0, questions.cwd)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.remove(questions.cwd)
    return (spec.origin or name) if spec is not None else ""


def log_dir_problem(log_dir: str) -> str:
    """Return why no run folder can be made in a folder, which may not be there yet; "": one can be made."""
    if not log_dir or log_dir == os.devnull:
        return ""
    folder = Path(log_dir)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def _door_problem(door: tuple[str, int]) -> str:
    if not door[0]:
        return ""
    try:
        socket.create_connection(door, timeout=_MOST_SECONDS).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _gpu_processes() -> int:
    """Return how many processes use the NVIDIA GPUs of this node, as `nvidia-smi` counts them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = [program, "--query-compute-apps=pid", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=_MOST_SECONDS, check=True)  # noqa: S603
        return sum(line.strip().isdecimal() for line in done.stdout.splitlines())
    return 0
