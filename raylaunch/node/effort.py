"""What a worker and all that it started have spent, as the kernel counts it: whether somebody works there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from raylaunch.core.stacks import Effort
from raylaunch.node import proc, processes

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_TIMES = slice(11, 15)
"""In /proc/PID/stat, after the name."""
_MOST = 1000
"""Processes of one worker that are looked at."""


def effort(pid: int) -> Effort:
    """All so far; what cannot be read, or is gone by now, counts as nothing."""
    own, ended = _times(pid)
    others = [process for process in _tree(pid) if process != pid]
    return Effort(
        cpu=own,
        cpu_of_others=ended + sum(sum(_times(process)) for process in others),
        bytes=sum(map(_bytes, [pid, *others])),
        wakes=_wakes(pid),
    )


def child_stopped(pid: int) -> bool:
    """Whether one of those that it started cannot run until a signal lets it."""
    return any(proc.state(process) == "T" for process in _tree(pid) if process != pid)


def _tree(pid: int) -> Iterator[int]:
    left = [pid]
    for _ in range(_MOST):
        if not left:
            return
        yield (parent := left.pop())
        with contextlib.suppress(OSError):
            left.extend(processes.children(parent))


def _times(pid: int) -> tuple[float, float]:
    """Seconds of the process itself, and of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        user, system, childrens_user, childrens_system = (int(field) * _TICK for field in fields[_TIMES])
        return user + system, childrens_user + childrens_system
    return 0.0, 0.0


def _bytes(pid: int) -> int:
    """By calls that read and write, and where it has files in memory, by those that it had to wait for."""
    counted = _fields(f"/proc/{pid}/io", {"rchar", "wchar", "read_bytes"})
    return max(counted.get("rchar", 0) + counted.get("wchar", 0), counted.get("read_bytes", 0))


def _wakes(pid: int) -> int:
    name = "voluntary_ctxt_switches"
    return _fields(f"/proc/{pid}/task/{pid}/status", {name}).get(name, 0)


def _fields(path: str, names: set[str]) -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path(path).read_text(errors="replace").splitlines())
        return {name: int(value) for name, _, value in lines if name in names}
    return {}
