"""What the system did not give us, and what a person may do about it: no mistake of ours, and none of the job's."""

from __future__ import annotations

import errno

_NO_PROC = "/proc must be mounted as it is on any Linux: workers are watched over and ended by it"
_DISK = "a disk is full, or has no room for more files: `df -h` and `df -i`, /tmp and /dev/shm included"
_HINTS = {
    errno.EMFILE: "more open files must be allowed: `ulimit -n` shows how many are",
    errno.ENFILE: "the machine has as many files open as its kernel allows: `sysctl fs.file-max`",
    errno.EAGAIN: "more processes and threads must be allowed: `ulimit -u`, or `pids.max` of the container",
    errno.ENOMEM: "more memory is needed: `free -h`, or `memory.max` of the container",
    errno.EFBIG: "larger files must be allowed: `ulimit -f` shows how large they may be",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
}


def advice(error: BaseException | None) -> str:
    """`""` where it is something else."""
    if isinstance(error, MemoryError):
        return _HINTS[errno.ENOMEM]
    if isinstance(error, RuntimeError) and "start new thread" in str(error):  # Python has no number for it
        return _HINTS[errno.EAGAIN]
    if not isinstance(error, OSError):
        return ""
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith("/proc/self/"):
        return _NO_PROC
    return _HINTS.get(error.errno or 0, "")
