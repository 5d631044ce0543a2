"""Finds out whether the kernel's OOM killer killed a process, from the kernel's counters and its log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from raylaunch.node.linux import cgroups

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in `linux/proc_ns.h`.

The kernel's log has the process ids of this namespace, so it is of no use in a container that has its own.
"""
_KILL_RECORD = re.compile(
    rb"(?:(Memory cgroup out|Out) of memory[^:]*: )?Killed process (\d+) "
    rb".*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
"""Written by `__oom_kill_process` in the kernel's `mm/oom_kill.c`."""
_LIMIT_TEXTS = {b"Memory cgroup out": " at its container's limit", b"Out": " when the machine had none left"}
_MAX_RECORDS = 5000
"""How many records of the log are read at once. Before a kill, the kernel lists every process that it could kill."""


class OomKills:
    """The processes that the OOM killer has killed on this machine since the last `reset`.

    Where it has killed none, a question costs two reads of small files, and the log is not read.
    """

    def __init__(self, proc: Path = Path("/proc"), log: Path = Path("/dev/kmsg")) -> None:
        self._machine_counter = proc / "vmstat"
        self._cgroup_counter = cgroup_counter(proc / "self")
        self._counts_before = self._counts()
        self._evidence_by_pid: dict[int, str] = {}
        self._log_fd = _open_log(proc, log)

    @property
    def reads_log(self) -> bool:
        """Whether the kernel's log can be read, and names processes by the ids that they have here."""
        return self._log_fd is not None

    def reset(self) -> None:
        """Forget all kills until now: process ids are used again."""
        self._counts_before = self._counts()
        self._evidence_by_pid.clear()
        if self._log_fd is not None:
            with contextlib.suppress(OSError):
                os.lseek(self._log_fd, 0, os.SEEK_END)

    def evidence(self, pid: int | None) -> str:
        """Return a text that says why a process that died by SIGKILL may have lacked memory, or `""`.

        None stands for a process whose id is not known.
        """
        machine, cgroup = (
            None if now is None or before is None else now - before
            for now, before in zip(self._counts(), self._counts_before, strict=True)
        )
        if machine == 0 and not cgroup:
            return ""
        if pid is not None:
            self._evidence_by_pid |= dict(self._new_log_records())
            if pid in self._evidence_by_pid:
                return self._evidence_by_pid[pid]
        if cgroup:
            return _count_text(cgroup, "container")
        return _count_text(machine, "machine") if machine and cgroup is None else ""

    def close(self) -> None:
        """Close the kernel's log, if it was opened."""
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None

    def _counts(self) -> tuple[int | None, int | None]:
        return _read_oom_kill(self._machine_counter), _read_oom_kill(self._cgroup_counter)

    def _new_log_records(self) -> Iterator[tuple[int, str]]:
        """Yield process id and evidence for each kill in the log since the last call."""
        if self._log_fd is None:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._log_fd, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read returns the oldest left
            except OSError:
                return
            if not record:
                return
            found = _KILL_RECORD.findall(record) if b"Killed process" in record else []  # the plain search is faster
            for limit, pid, *sizes in found:
                resident = sum(int(size or 0) for size in sizes) / 1024
                where = _LIMIT_TEXTS.get(limit, "")
                yield int(pid), f"out of memory: the kernel killed it{where}, {resident:.0f} MiB resident"


def _open_log(proc: Path, path: Path) -> int | None:
    try:
        if os.readlink(proc / "self/ns/pid") != _INITIAL_PID_NAMESPACE:
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log


def _count_text(count: int, where: str) -> str:
    processes = "process" if count == 1 else "processes"
    return f"the kernel killed {count} {processes} of this {where} for lack of memory meanwhile"


def _read_oom_kill(path: Path | None) -> int | None:
    """Read the line `oom_kill N`, which /proc/vmstat and the memory files of both cgroup versions have."""
    if path is None:
        return None
    try:
        found = re.search(rb"^oom_kill (\d+)$", path.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def cgroup_counter(process: Path) -> Path | None:
    """Return the file that counts OOM kills in the memory cgroup of a process, given as `/proc/PID`.

    That is `memory.events` of cgroup v2, which also counts kills in child cgroups
    (`Documentation/admin-guide/cgroup-v2.rst` of the kernel), or `memory.oom_control` of cgroup v1, which does not.
    """
    for folder in cgroups.folders(process, "memory"):
        for name in ("memory.oom_control", "memory.events"):
            if _read_oom_kill(folder / name) is not None:
                return folder / name
    return None
