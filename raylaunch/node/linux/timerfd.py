"""A timer that can be waited for together with sockets: timerfd(2).

`os.timerfd_create` does the same from Python 3.13 on.
"""

from __future__ import annotations

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_NS_PER_S = 1_000_000_000


class _Itimerspec(ctypes.Structure):
    """`struct itimerspec` of timerfd_settime(2)."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """A one-shot timer on CLOCK_MONOTONIC with a file descriptor. The constructor raises OSError."""

    def __init__(self) -> None:
        self._fd: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def fileno(self) -> int:
        """Return a descriptor that is readable from the moment the timer expires until it is set again."""
        return self._fd

    def set(self, seconds: float | None) -> None:
        """Let the timer expire in `seconds`, or never (None), in place of what was set before."""
        value = 0 if seconds is None else max(1, round(seconds * _NS_PER_S))
        _LIBC.timerfd_settime(self._fd, 0, ctypes.byref(_Itimerspec(0, 0, *divmod(value, _NS_PER_S))), None)

    def close(self) -> None:
        """Close the file descriptor of the timer."""
        os.close(self._fd)
