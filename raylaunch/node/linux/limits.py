"""Which limit of the operating system was reached, for an error message.

A system call that fails does not say which of several limits it met. So this compares the limits that may explain the
error with what is in use.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from raylaunch.node.linux import cgroups, processes


def explained(error: OSError, who: str, proc: Path = Path("/proc")) -> str:
    """Return what an error means, for a shortage with the limit that was reached and its value.

    `who` names this process, such as `the fork server`.
    """
    what = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.EMFILE:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = f"{who} (pid {os.getpid()}) may have {soft} open files (RLIMIT_NOFILE)"
        case errno.ENFILE:
            reason = f"this machine may have {_number(proc / 'sys/fs/file-max')} open files (fs.file-max)"
        case errno.EAGAIN:
            reason = _tightest(_process_limits(proc)) or "a limit of processes and threads was reached"
        case errno.ENOMEM:
            reason = _tightest(_memory_limits(proc)) or "this machine has no memory left"
        case _:
            return what
    return f"{what}: {reason}"


def _tightest(limits: Iterator[tuple[float, str]]) -> str:
    """Return the text of the limit of which the least is left."""
    return min(limits, default=(0.0, ""))[1]


def _process_limits(proc: Path) -> Iterator[tuple[float, str]]:
    """Yield how much is left of each limit of processes and threads, and a text with its value."""
    for folder in cgroups.folders(proc / "self", "pids", above=True):
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / "pids.max").read_text())
            left = most - int((folder / "pids.current").read_text())
            yield left, f"the container may have {most} processes and threads (pids.max in {folder})"
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and most != resource.RLIM_INFINITY:
        left = most - _threads_of_user(proc)
        yield left, f"the user with id {os.geteuid()} may have {most} processes and threads (RLIMIT_NPROC)"
    with contextlib.suppress(OSError, ValueError):
        threads = int((proc / "loadavg").read_text().split()[3].split("/")[1])
        for name in ("threads-max", "pid_max"):
            most = int((proc / "sys/kernel" / name).read_text())
            yield most - threads, f"this machine may have {most} processes and threads (kernel.{name})"


def _threads_of_user(proc: Path) -> int:
    """Return the number of processes and threads that have this process's real user."""
    count, user = 0, os.getuid()
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, KeyError):
                fields = dict(line.split(":", 1) for line in processes.lines_of(folder / "status"))
                count += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return count


def _memory_limits(proc: Path) -> Iterator[tuple[float, str]]:
    """Yield how many bytes are left of each limit of memory, and a text with its value."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        used = int((proc / "self/statm").read_text().split()[0]) * resource.getpagesize()
        yield most - used, f"each process may have {_mib(most)} of address space (RLIMIT_AS)"
    for folder in cgroups.folders(proc / "self", "memory", above=True):
        for limit, current in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):
                most = int((folder / limit).read_text())
                left = most - int((folder / current).read_text()) + _reclaimable(folder)
                yield left, f"the container may have {_mib(most)} of memory ({limit} in {folder})"
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in processes.lines_of(proc / "meminfo"))
        known = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
        yield known["MemAvailable"], f"{_mib(known['MemAvailable'])} of {_mib(known['MemTotal'])} of memory are free"
        if (proc / "sys/vm/overcommit_memory").read_text().strip() == "2":
            most = known["CommitLimit"]
            left = most - known["Committed_AS"]
            yield left, f"all processes may reserve {_mib(most)} of memory (vm.overcommit_memory is 2)"


def _reclaimable(group: Path) -> int:
    """Return the bytes of a group's file cache that the kernel frees as soon as they are needed."""
    try:
        rows = dict(line.split() for line in processes.lines_of(group / "memory.stat"))
        return int(rows.get("total_inactive_file") or rows["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def free_memory(proc: Path = Path("/proc")) -> tuple[float, str]:
    """Return how many bytes this process may still use, and which limit that is, for a person."""
    return min(_memory_limits(proc), default=(math.inf, ""))


def _number(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # it takes an open file to read it
        return "no more"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
