"""Evidence that the kernel killed a process for lack of memory: its own counts, and its own log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's log names processes by their numbers there; in a container with numbers of its own it cannot be used."""
_KILLED = re.compile(
    rb"(?:(Memory cgroup out|Out) of memory[^:]*: )?Killed process (\d+) "
    rb".*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_WHOSE = {b"Memory cgroup out": " at its container's limit", b"Out": " when the machine had none left"}
_MOST_RECORDS = 5000
"""Of the log, at one look. The kernel lists every process of the machine, or of the cgroup, before it kills one."""


class KernelKills:
    """What the kernel killed on this machine since the last `mark`.

    Cheap where it killed nothing: two small files are read, and the log is not.
    """

    def __init__(self, proc: Path = Path("/proc"), log: Path = Path("/dev/kmsg")) -> None:
        self._machine = proc / "vmstat"
        self._container = counter_of_cgroup(proc / "self")
        self._counted = self._counts()
        self._named: dict[int, str] = {}
        self._log = _open_log(proc, log)

    def mark(self) -> None:
        """What happened before does not count any more."""
        self._counted = self._counts()
        self._named.clear()
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.lseek(self._log, 0, os.SEEK_END)

    def evidence(self, pid: int | None) -> str:
        """Why a process that SIGKILL ended may have lacked memory, or `""`. None: its process id is not known."""
        machine, container = (
            None if now is None or before is None else now - before
            for now, before in zip(self._counts(), self._counted, strict=True)
        )
        if machine == 0 and not container:
            return ""
        if pid is not None:
            self._named |= dict(self._kills())
            if pid in self._named:
                return self._named[pid]
        if container:
            return _meanwhile(container, "container")
        return _meanwhile(machine, "machine") if machine and container is None else ""

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _counts(self) -> tuple[int | None, int | None]:
        return _oom_kills(self._machine), _oom_kills(self._container)

    def _kills(self) -> Iterator[tuple[int, str]]:
        """Process ids and what the log says of them, from the records since the last look."""
        if self._log is None:
            return
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read gives the oldest there is
            except OSError:
                return
            if not record:
                return
            found = _KILLED.findall(record) if b"Killed process" in record else []  # searched for first: it is faster
            for whose, pid, *sizes in found:
                resident = sum(int(size or 0) for size in sizes) / 1024
                where = _WHOSE.get(whose, "")
                yield int(pid), f"out of memory: the kernel killed it{where}, {resident:.0f} MiB resident"


def _open_log(proc: Path, path: Path) -> int | None:
    try:
        if os.readlink(proc / "self/ns/pid") != _FIRST_PID_NAMESPACE:
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log


def _meanwhile(count: int, where: str) -> str:
    processes = "process" if count == 1 else "processes"
    return f"the kernel killed {count} {processes} of this {where} for lack of memory meanwhile"


def _oom_kills(path: Path | None) -> int | None:
    """The line `oom_kill N`, which three kinds of files have."""
    if path is None:
        return None
    try:
        found = re.search(rb"^oom_kill (\d+)$", path.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def counter_of_cgroup(process: Path) -> Path | None:
    """The file that counts kills in the memory cgroup of a process (`/proc/self`).

    It is `memory.events` of cgroup v2, where kills in cgroups below count too, or `memory.oom_control` of v1, which
    counts its own only.
    """
    try:
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return None
    for version, name in (("cgroup", "memory.oom_control"), ("cgroup2", "memory.events")):
        for _, controllers, group in groups:
            if ("memory" in controllers.split(",")) if version == "cgroup" else not controllers:
                for root, mounted in _mounts(mounts, version):
                    file = _within(root, mounted, group) / name
                    if _oom_kills(file) is not None:
                        return file
    return None


def _mounts(lines: list[list[str]], version: str) -> Iterator[tuple[str, str]]:
    """Root and place of the mounts of a version that hold the memory controller."""
    for line in lines:
        kind, _, options = line[line.index("-") + 1 :][:3]
        if kind == version and (version == "cgroup2" or "memory" in options.split(",")):
            yield line[3], line[4]


def _within(root: str, mounted: str, group: str) -> Path:
    """Where a cgroup is, in a mount that shows the tree from `root` on; outside of it, the mount's own top."""
    try:
        return Path(mounted) / PurePosixPath(group).relative_to(root)
    except ValueError:
        return Path(mounted)
