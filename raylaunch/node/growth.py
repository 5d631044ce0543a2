"""Being told that files grow (inotify). Each is told of once, then asked for again: who writes much pays nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_MODIFIED, _ONCE = 0x2, 0x80000000
_MOST_BYTES = 64 * 1024

_LIBC = ctypes.CDLL(None, use_errno=True)


class Growth:
    """Where the kernel cannot tell, `watch` says so."""

    def __init__(self) -> None:
        self._fd: int = _LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Readable when one of the files has grown; -1: the kernel cannot tell."""
        return self._fd

    def watch(self, files: Iterable[int]) -> bool:
        """Tell of the next write to any of these file descriptors. False: not all of them can be watched."""
        if self._fd < 0:
            return False
        paths = [f"/proc/self/fd/{file}".encode() for file in files]
        return all(_LIBC.inotify_add_watch(self._fd, path, _MODIFIED | _ONCE) >= 0 for path in paths)

    def heard(self) -> None:
        """It is known; be readable again at the next."""
        try:
            while os.read(self._fd, _MOST_BYTES):
                pass
        except OSError:
            pass  # there is nothing more

    def close(self) -> None:
        """Let go of all."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
