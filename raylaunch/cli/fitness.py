"""Which commands a warm driver may serve: those whose own process would come out as it is."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raylaunch.core.terminal import is_of_a_terminal

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def key(environ: Mapping[str, str]) -> str:
    """Equal for commands that one warm driver may serve, and for that driver itself; tells nothing of what it is of.

    What is handed over with each run is no part of it: the working folder, the umask, what terminal it is.
    """
    parts = (_python(), [*_code()], _process(), _environment(environ))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _python() -> tuple[Any, ...]:
    flags = repr(sys.flags).replace("safe_path=True", "safe_path=False")  # a warm driver has it for itself
    return sys.executable, sys.prefix, sys.version, flags, sys.warnoptions, sorted(sys._xoptions)  # noqa: SLF001


def _code() -> Iterator[tuple[str, int, int]]:
    """Files with the time of their last change: all of ours, so that edited code is not served by what it was."""
    ours = Path(__file__).parents[1]
    for folder, _, names in sorted(os.walk(ours)):
        yield from (_file(os.path.join(folder, name)) for name in sorted(names) if name.endswith(".py"))
    for package in ("ray", "torch"):
        spec = find_spec(package)
        yield _file(spec.origin) if spec is not None and spec.origin else (package, 0, 0)


def _file(path: str) -> tuple[str, int, int]:
    found = os.stat(path)
    return path, found.st_mtime_ns, found.st_size


def _process() -> tuple[Any, ...]:
    """Whose it is, where it is, what it may use."""
    return (
        (os.geteuid(), os.getegid(), sorted(os.getgroups())),
        [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        Path("/proc/self/limits").read_text(encoding="utf-8"),
        (os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))),
    )


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in environ.items() if not is_of_a_terminal(name))
