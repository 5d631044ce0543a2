"""What /proc says of other processes: state, memory, signals, and what they have used (proc(5)).

Functions that take a process id return an empty value for a process that is gone.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from raylaunch.core.failures.stacks import ResourceUsage
from raylaunch.node.linux import processes

GONE = "X"
"""The state of a process that does not exist; the kernel's letter for a dead one."""

_SECONDS_PER_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_TIME_FIELDS = slice(11, 15)
"""utime, stime, cutime and cstime in /proc/PID/stat, counted from the field after the name."""
_START_FIELD = 19
"""starttime in /proc/PID/stat, counted from the field after the name."""
_MASKS = frozenset(("SigBlk", "SigIgn", "SigCgt"))
_MAX_DESCENDANTS = 1000
"""How many processes of one worker are looked at."""


def user_name() -> str:
    """Return the name of the user of this process, or the number if there is no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def process_state(pid: int) -> str:
    """Return the kernel's letter: `R` running, `S` sleeping, `D` in the kernel, `T` stopped, `Z` zombie, ..."""
    try:
        return _stat(pid)[0]
    except OSError:
        return GONE


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since the machine booted; 0 if it does not exist."""
    try:
        return int(_stat(pid)[_START_FIELD])
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    return process_state(pid) in ("T", "t")


def blocks(pid: int, number: int) -> bool:
    """Return whether the main thread blocks a signal, as it does while the handler of that signal runs."""
    return _has_signal(signal_masks(pid).get("SigBlk", 0), number)


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal."""
    return _has_signal(signal_masks(pid).get("SigCgt", 0), number)


def catches_or_ignores(pid: int, number: int) -> bool:
    """Return whether the default action of a signal is replaced, by a handler or by SIG_IGN."""
    masks = signal_masks(pid)
    return _has_signal(masks.get("SigCgt", 0) | masks.get("SigIgn", 0), number)


def signal_masks(pid: int) -> dict[str, int]:
    """Return the bit masks of blocked, ignored and caught signals: keys `SigBlk`, `SigIgn`, `SigCgt`."""
    return _fields(f"/proc/{pid}/status", _MASKS, base=16)


def _has_signal(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)


def resource_usage(pid: int) -> ResourceUsage:
    """Return what a process and all its descendants have used since they started."""
    own, ended = _cpu_seconds(pid)
    others = [process for process in _tree(pid) if process != pid]
    return ResourceUsage(
        cpu=own,
        cpu_of_others=ended + sum(sum(_cpu_seconds(process)) for process in others),
        bytes=sum(map(_io_bytes, [pid, *others])),
        wakes=_voluntary_switches(pid),
    )


def has_stopped_child(pid: int) -> bool:
    """Return whether a signal has stopped one of the process's descendants."""
    return any(process_state(process) == "T" for process in _tree(pid) if process != pid)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    left = [pid]
    for _ in range(_MAX_DESCENDANTS):
        if not left:
            return
        yield (parent := left.pop())
        with contextlib.suppress(OSError):
            left.extend(processes.children(parent))


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process itself, and of the children that it has waited for."""
    with contextlib.suppress(OSError):
        user, system, childrens_user, childrens_system = (
            int(field) * _SECONDS_PER_TICK for field in _stat(pid)[_TIME_FIELDS]
        )
        return user + system, childrens_user + childrens_system
    return 0.0, 0.0


def _io_bytes(pid: int) -> int:
    """Return the bytes that were read and written by system calls or, if that is more, read from disk.

    Reads through a memory mapping are only in the second number.
    """
    counted = _fields(f"/proc/{pid}/io", {"rchar", "wchar", "read_bytes"})
    return max(counted.get("rchar", 0) + counted.get("wchar", 0), counted.get("read_bytes", 0))


def _voluntary_switches(pid: int) -> int:
    name = "voluntary_ctxt_switches"
    return _fields(f"/proc/{pid}/task/{pid}/status", {name}).get(name, 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()


def _fields(path: str, names: frozenset[str] | set[str], base: int = 10) -> dict[str, int]:
    """Return the numbers of the lines `NAME: NUMBER [UNIT]` of a file."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in processes.lines_of(path))
        return {name: int(value.split()[0], base) for name, _, value in lines if name in names}
    return {}
