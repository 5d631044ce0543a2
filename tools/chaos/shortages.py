"""Faults of a machine that lacks processes or memory, or whose disk stands still. Each is over after two seconds."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.host import Host, send
from tools.chaos.job import Job

_SECONDS = 2.0
"""Less than `hang_timeout`, and than a fork server tries again to start workers."""
_SPARE_BYTES = 512 * 1024
_DISK_MIB = 512


class Group:
    """A control group of its own with one limit, in which processes are for a while. For version 1 of cgroups."""

    def __init__(self, controller: str, limit: str) -> None:
        self._root = Path("/sys/fs/cgroup", controller)
        self._controller = controller
        self._limit = limit
        self._folder = self._root / f"raylaunch-chaos-{os.getpid()}"

    def why_not(self) -> str:
        """Return why there can be no such group; `""`: there can."""
        try:
            self._folder.mkdir()
            self._folder.rmdir()
        except OSError as error:
            return f"no group of cgroup v1 can be made in {self._root}: {error.strerror}"
        return ""

    @contextlib.contextmanager
    def of(self, pids: list[int]) -> Iterator[Path]:
        """Put these processes, and what they start, into a new group; yield the file of its limit."""
        self._folder.mkdir()
        before = {pid: self._group_of(pid) for pid in pids}
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (self._folder / "cgroup.procs").write_text(str(pid))
            yield self._folder / self._limit
        finally:
            home = next(iter(before.values()), self._root)
            self._empty(home)

    def _empty(self, home: Path) -> None:
        deadline = time.monotonic() + 30
        while True:
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (home / "cgroup.procs").write_text(pid)
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _group_of(self, pid: int) -> Path:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if self._controller in controllers.split(","):
                return self._root / group.removeprefix("/")
        return self._root


PIDS = Group("pids", "pids.max")
MEMORY = Group("memory", "memory.limit_in_bytes")


def no_processes(job: Job, host: Host) -> tuple[str, ...]:
    """A worker is killed, and for a while no process can be forked on its host (`pids.max`)."""
    workers, servers = job.workers(host), job.fork_servers(host)
    with PIDS.of(servers) as limit:
        limit.write_text(str(len(servers)))
        send(workers[:1], signal.SIGKILL)
        time.sleep(_SECONDS)
        limit.write_text("max")
    return ("WorkersExited",)


def no_memory(job: Job, host: Host) -> tuple[str, ...]:
    """A worker is killed, and for a while the fork server gets next to no memory: forks fail, or the kernel kills it."""
    workers, servers = job.workers(host), job.fork_servers(host)
    with MEMORY.of(servers) as limit:
        limit.write_text(str(_SPARE_BYTES))
        send([random.choice(workers)] if workers else [], signal.SIGKILL)
        time.sleep(_SECONDS)
        limit.write_text("-1")
    return ("WorkersExited", "NodeLost")


def stalled_disk(job: Job, host: Host) -> tuple[str, ...]:
    """Writes into the run folder and by the workers wait, as those of a network file system whose server is away."""
    del host
    disk = str(job.folder.parent)
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    try:
        time.sleep(_SECONDS)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
    return ()


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of its own, and yield where it is; where that is not possible, an ordinary folder."""
    image, where = folder / "disk.img", folder / "disk"
    where.mkdir()
    if why_no_stall():
        yield where
        return
    with image.open("wb") as file:
        file.truncate(_DISK_MIB * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    shutil.rmtree(where / "lost+found")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def why_no_stall() -> str:
    """Return why no file system can be mounted and frozen; `""`: it can."""
    missing = [tool for tool in ("mkfs.ext4", "mount", "fsfreeze") if shutil.which(tool) is None]
    if missing or not Path("/dev/loop-control").exists():
        return f"{', '.join(missing) or 'a loop device'} not found"
    return ""
