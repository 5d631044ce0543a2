"""Child processes: how they are forked, how none is lost, how all are killed, and how little memory a fork costs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CLEANUP_SECONDS = 5.0
"""How long a process may take to kill everything that it has started."""
CLEANUP_WAIT_SECONDS = CLEANUP_SECONDS + 1.0
"""How long others wait for a process that does so, before they go on without it."""
F_SETSIG = 10
"""Which signal tells of a file descriptor (fcntl(2)). Python's `fcntl` has it from 3.13 on."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_DONTNEED = 4
_MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_NO_FULL_COLLECTIONS = 1_000_000_000
"""As the third threshold of `gc`: collections of the middle generation before a full collection."""


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process, so that none is lost when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_on_parent_death(number: int, parent: int) -> None:
    """Let the kernel send this process a signal when its parent dies; send it now if the parent is dead already."""
    # Workers have a function of their own (`worker.runtime.process_setup`): the subreaper, which runs this one, stays
    # small, and so imports nothing of `raylaunch.worker`.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def children(pid: int = 0) -> set[int]:
    """Return the process ids of the direct children of a process (0: this one), zombies included."""
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
                parent = (folder / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[1]
                if int(parent) == pid:
                    found.add(int(folder.name))
    return found


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group. Return whether the group has members, zombies included.

    The leader must not have been reaped: afterwards the number may belong to a group of somebody else.
    """
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_with_group(pid: int) -> bool:
    """Send SIGKILL to a process that was not reaped yet, and to its process group if it leads one.

    Return False if this process may not be killed: it runs as another user, as a setuid program does. Children that it
    leaves outside the group become children of the subreaper, which kills them next.
    """
    signal_group(pid, signal.SIGKILL)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def kill_children(timeout: float) -> bool:
    """Kill all children of this process, and orphans that become its children meanwhile.

    Return True once only processes of other users are left, and False after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while left := [pid for pid in children() if kill_with_group(pid)]:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    return True


def set_niceness(niceness: int) -> None:
    """Set the niceness of all threads of this process, if that is allowed: only root may lower it.

    Ray starts its workers at nice 15 (`RAY_worker_niceness`), and everything that they start would inherit it.
    """
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Run no full garbage collection in this block, which imports much: that would take a fifth of the time.

    If the block changes the thresholds of `gc` itself, its change stays.
    """
    threshold0, threshold1, threshold2 = gc.get_threshold()
    gc.set_threshold(threshold0, threshold1, _NO_FULL_COLLECTIONS)
    yield
    if gc.get_threshold() == (threshold0, threshold1, _NO_FULL_COLLECTIONS):
        gc.set_threshold(threshold0, threshold1, threshold2)


def prepare_to_fork() -> None:
    """Make forks of this process small and fast. Called when everything is imported that children are to have."""
    gc.freeze()  # collections in children then leave shared pages alone; the garbage that stays is under a megabyte
    release_memory()
    _collapse_into_huge_pages()


def release_memory() -> None:
    """Return memory to the kernel that only imports needed: freed heap, and file pages that can be read again.

    Only mappings of files that have no modified page are released, so nothing is lost. After `import torch` that is
    70 MB that no child needs, and that would make each fork slower.
    """
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    for start, end in _clean_file_mappings(lines_of("/proc/self/smaps")):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _collapse_into_huge_pages() -> None:
    """Move the heap into pages of 2 MB, so that a fork copies, and an exit frees, fewer page table entries.

    With torch imported, both take a third of the time. A child that writes to a page still copies 4 KB. Does nothing
    before Linux 6.1, which introduced MADV_COLLAPSE.
    """
    libc = ctypes.CDLL(None)
    for start, end in _huge_page_ranges(lines_of("/proc/self/maps")):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def lines_of(path: str | Path) -> list[str]:
    """Return the lines of a file of /proc. Raises OSError.

    Names of files and processes in it need not be UTF-8, and may have any character but a newline.
    """
    text = os.fsdecode(Path(path).read_bytes()).rstrip("\n")
    return text.split("\n") if text else []


def _huge_page_ranges(maps: list[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of private, writable memory, as far as it consists of whole huge pages."""
    for line in maps:
        addresses, permissions, _, _, _, *name = line.split()
        low, _, high = addresses.partition("-")
        start = -(-int(low, 16) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = int(high, 16) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if permissions.startswith("rw") and name in ([], ["[heap]"]) and start < end:
            yield start, end


def _clean_file_mappings(smaps: list[str]) -> Iterator[tuple[int, int]]:
    addresses, is_file = "", False
    for line in smaps:
        fields = line.split()
        if "-" in fields[0]:
            addresses, is_file = fields[0], len(fields) > 5 and fields[5].startswith("/")  # noqa: PLR2004
        elif fields[0] == "Anonymous:" and is_file and fields[1] == "0":
            low, _, high = addresses.partition("-")
            yield int(low, 16), int(high, 16)


Run = Callable[[], int]
"""What a process does. Returns its exit code."""


class BecomeChild(BaseException):
    """Raised in a forked child. `run` is what the child does instead of going on.

    A forked child has its parent's call stack. If it ran its own work on top of it, it could not return, and so could
    not end as an interpreter does, with exit handlers, threads joined and buffers written. So `fork` raises this in the
    child, which unwinds the stack, and `run_at_bottom` calls what the exception carries.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


def fork(run: Run) -> int:
    """Fork a child that does this. Returns its process id; in the child, raises `BecomeChild`. Raises OSError."""
    pid = os.fork()
    if pid == 0:
        raise BecomeChild(run)
    return pid


def run_at_bottom(run: Run) -> int:
    """Do this, and in every child that it forks, what that child was forked for. Returns the process's exit code."""
    while True:
        try:
            return run()
        except BecomeChild as child:
            run = child.run
