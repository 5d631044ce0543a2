"""A clock that can be waited for together with sockets: readable from the time it was set to."""

from __future__ import annotations

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_NANO = 1_000_000_000


class _Itimerspec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """One timer of the kernel's (timerfd, which Python has from 3.13 on)."""

    def __init__(self) -> None:
        self._fd: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def fileno(self) -> int:
        """Readable once the time has come, until it is set again."""
        return self._fd

    def set(self, seconds: float | None) -> None:
        """Ring in so many seconds; None: never. What was set before is forgotten."""
        value = 0 if seconds is None else max(1, round(seconds * _NANO))
        _LIBC.timerfd_settime(self._fd, 0, ctypes.byref(_Itimerspec(0, 0, *divmod(value, _NANO))), None)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)
