"""What Linux can do for a parent who must lose no descendant."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Have orphaned descendants become our children, so that none escapes by losing its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def on_death_of_parent(number: int, parent: int) -> None:
    """Have the kernel send us this signal when the parent dies, or send it now if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_children(seconds: float) -> None:
    """End all children and what they leave to us, until none is left or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def children() -> set[int]:
    """All direct children of this process, zombies and inherited orphans included."""
    found: set[int] = set()
    try:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                found.update(int(pid) for pid in (thread / "children").read_text().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_scan()
    return found


def _children_by_scan() -> set[int]:
    me = str(os.getpid())
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                if parent == me:
                    found.add(int(folder.name))
    return found


def signal_group(group: int, number: int) -> bool:
    """Whether the process group has members (zombies count); those that may got the signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_tree(pid: int) -> None:
    """SIGKILL to a process, and to its group where it leads one. Its orphans come to us and are next."""
    signal_group(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
