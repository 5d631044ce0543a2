"""A disk of the job's own, which can stand still for a while."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.host import Host
from tools.chaos.job import Job

_SECONDS = 2.0
"""Less than `hang_timeout`."""
_DISK_MIB = 512


def stalled_disk(job: Job, host: Host) -> tuple[str, ...]:
    """Writes into the run folder and by the workers wait, as on a network file system whose server is away."""
    del host
    disk = str(job.folder.parent)
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    try:
        time.sleep(_SECONDS)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
    return ()


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
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
