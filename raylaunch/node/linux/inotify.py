"""An inotify(7) wrapper that wakes the log tailer when files are written to.

It watches with IN_ONESHOT, so a process that writes much costs one event for each call of `watch`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_IN_MODIFY, _IN_ONESHOT = 0x2, 0x80000000
_BUFFER_BYTES = 64 * 1024

_LIBC = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """One inotify instance. Where the kernel gives none (`fs.inotify.max_user_instances`), `watch` returns False."""

    def __init__(self) -> None:
        self._fd: int = _LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        #: The last watch of each file, by descriptor. The kernel has removed it if the file was written to since.
        self._watches: dict[int, int] = {}

    def fileno(self) -> int:
        """Return a descriptor that is readable after a write to a watched file; -1 where there is no instance."""
        return self._fd

    def watch(self, fds: Iterable[int]) -> bool:
        """Watch for the next write to each of these open files. Return False if not all can be watched."""
        if self._fd < 0:
            return False
        return all(self._watch(fd) for fd in fds)

    def _watch(self, fd: int) -> bool:
        path = f"/proc/self/fd/{fd}".encode()
        watch: int = _LIBC.inotify_add_watch(self._fd, path, _IN_MODIFY | _IN_ONESHOT)
        if watch >= 0:
            self._watches[fd] = watch
        return watch >= 0

    def unwatch(self, fd: int) -> None:
        """Stop watching a file that is about to be closed: its watch would last as long as the file exists."""
        watch = self._watches.pop(fd, None)
        if watch is not None:
            _LIBC.inotify_rm_watch(self._fd, watch)  # fails if the kernel has removed it; no number is used twice

    def drain(self) -> None:
        """Drop all pending events, so that the descriptor is readable again only after the next one."""
        try:
            while os.read(self._fd, _BUFFER_BYTES):
                pass
        except OSError:
            pass  # nothing is pending

    def close(self) -> None:
        """Close the descriptor, which ends all watches."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._watches.clear()
