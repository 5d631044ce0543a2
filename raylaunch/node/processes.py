"""What Linux can do for a parent who must lose no descendant."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MADV_DONTNEED = 4
_NEVER = 1_000_000_000
"""Collections of young objects before a full one."""
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Have orphaned descendants become our children, so that none escapes by losing its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def on_death_of_parent(number: int, parent: int) -> None:
    """Have the kernel send us this signal when the parent dies, or send it now if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_children(seconds: float, *, spared: int = 0) -> bool:
    """End all children but one, and what they leave to us, until none is left (True) or the time is over (False)."""
    deadline = time.monotonic() + seconds
    while left := children() - {spared}:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def only_young_collected() -> Iterator[None]:
    """While much is imported: full collections would look again and again at what stays, a fifth of the time.

    Who sets the collector meanwhile has the last word.
    """
    objects, young, full = gc.get_threshold()
    gc.set_threshold(objects, young, _NEVER)
    yield
    if gc.get_threshold() == (objects, young, _NEVER):
        gc.set_threshold(objects, young, full)


def get_ready_to_fork() -> None:
    """To be called when all is imported that children are to have: makes them small, and quick to come and go."""
    gc.freeze()  # keeps the collector from writing to pages that all share; what it would free now is hardly a megabyte
    give_back_memory()
    use_huge_pages()


def give_back_memory() -> None:
    """Give back what only importing needed: freed heap, and pages of libraries that come again when they are used.

    Only mappings without a page of our own are let go, so nothing is lost. After `import torch` that is 70 MB, which
    no child needs, and forks are faster without them.
    """
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    for start, end in _clean_file_mappings(Path("/proc/self/smaps").read_text()):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def use_huge_pages() -> None:
    """Keep what memory we have in pages of 2 MB, so that a fork copies, and a child's end frees, few entries of tables.

    With torch imported, either takes a third of the time. A page that is written to is copied alone, as ever, and
    what is allocated later is as ever. Where the kernel cannot (before Linux 6.1), nothing changes.
    """
    libc = ctypes.CDLL(None)
    for begin, end in _heaps(Path("/proc/self/maps").read_text()):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def _heaps(maps: str) -> Iterator[tuple[int, int]]:
    """Memory of our own, as far as it is made of whole huge pages."""
    for line in maps.splitlines():
        addresses, permissions, _, _, _, *name = line.split()
        low, _, high = addresses.partition("-")
        begin, end = -(-int(low, 16) // _HUGE_PAGE) * _HUGE_PAGE, int(high, 16) // _HUGE_PAGE * _HUGE_PAGE
        if permissions.startswith("rw") and name in ([], ["[heap]"]) and begin < end:
            yield begin, end


def _clean_file_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    addresses, is_file = "", False
    for line in smaps.splitlines():
        fields = line.split()
        if "-" in fields[0]:
            addresses, is_file = fields[0], len(fields) > 5 and fields[5].startswith("/")  # noqa: PLR2004
        elif fields[0] == "Anonymous:" and is_file and fields[1] == "0":
            low, _, high = addresses.partition("-")
            yield int(low, 16), int(high, 16)


def be_as_nice_as_others() -> None:
    """Ray's workers run at nice 15, and so would all that they start. Going back takes privilege; without, it stays.

    Each thread has a niceness of its own.
    """
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def children(pid: int = 0) -> set[int]:
    """All direct children of the process (0: this one), zombies and inherited orphans included."""
    pid = pid or os.getpid()
    found: set[int] = set()
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                found.update(int(child) for child in (thread / "children").read_text().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_scan(pid)
    return found


def _children_by_scan(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                if int(parent) == pid:
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
