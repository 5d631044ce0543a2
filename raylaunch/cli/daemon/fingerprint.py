"""The fingerprint that decides which commands a daemon may serve: those whose own process would be the same."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raylaunch.core.placement.environment import is_of_a_terminal
from raylaunch.worker import cpython_internals

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def key(environ: Mapping[str, str]) -> str:
    """Return a hash of the interpreter, the code, the process's limits and namespaces, and the environment.

    It is equal for a daemon and the commands that it may serve, and reveals nothing of what it is made from. What is
    sent with each run is not part of it: the working folder, the umask, and the variables of the terminal.
    """
    parts = (_python(), [*_code()], _process(), _environment(environ))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _python() -> tuple[Any, ...]:
    flags = repr(sys.flags).replace("safe_path=True", "safe_path=False")  # only the daemon is started with -P
    return sys.executable, sys.prefix, sys.version, flags, sys.warnoptions, cpython_internals.x_options()


def _code() -> Iterator[tuple[str, int, int]]:
    """Yield path, mtime and size of every module of raylaunch and of two libraries: a daemon must not run old code."""
    package = Path(__file__).parents[2]
    for folder, _, names in sorted(os.walk(package)):
        yield from (_file(os.path.join(folder, name)) for name in sorted(names) if name.endswith(".py"))
    for library in ("ray", "torch"):
        spec = find_spec(library)
        yield _file(spec.origin) if spec is not None and spec.origin else (library, 0, 0)


def _file(path: str) -> tuple[str, int, int]:
    found = os.stat(path)
    return path, found.st_mtime_ns, found.st_size


def _process() -> tuple[Any, ...]:
    """Return the user, the namespaces, and the resource limits of this process."""
    return (
        (os.geteuid(), os.getegid(), sorted(os.getgroups())),
        [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        Path("/proc/self/limits").read_text(encoding="utf-8"),
        (os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))),
    )


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in environ.items() if not is_of_a_terminal(name))
