"""The command line and the name of this process as others see them: in /proc, `ps`, `top`, and the dashboard of Ray.

The kernel reads the command line from the memory of the process (`get_mm_cmdline` in fs/proc/base.c), so that writing
there needs no rights. `setproctitle` does the same. It is not used because it finds that memory by way of `environ`,
which a fork server has changed by the time that it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46
"""Where the command line is in memory: fields of /proc/PID/stat (proc(5)), counted from the one after the name."""


def overwrite(redacted: Callable[[Sequence[str]], Sequence[object]]) -> None:
    """Overwrite the arguments of this process that `redacted` changes. It must return as many as it is given.

    None gets longer; the end of one that gets shorter is filled with spaces. `sys.argv` and `sys.orig_argv` are copies,
    and stay. Does nothing where /proc cannot be read.
    """
    start, size, _ = _original()
    with contextlib.suppress(OSError, ValueError):
        before = Path("/proc/self/cmdline").read_bytes()
        words = before.removesuffix(b"\0").split(b"\0")
        shown = redacted([os.fsdecode(word) for word in words])
        after = b"\0".join(_fitted(str(new), word) for new, word in zip(shown, words, strict=True)) + b"\0"
        if len(before) == len(after) == size and before != after:
            ctypes.memmove(start, after, size)


def _fitted(text: str, before: bytes) -> bytes:
    """Return the text in as many bytes as there were before."""
    return os.fsencode(text)[: len(before)].ljust(len(before))


def prepare_titles() -> None:
    """Find out, in a program that was just started, what this process and its forks need for their titles."""
    _original()


def set_helper_title(role: str) -> None:
    """Show this process as `raylaunch: ROLE` where command lines are shown, and as `rl:ROLE` where names are.

    A name has 15 characters at most.
    """
    _set_title(f"raylaunch: {role}", f"rl:{role}".encode())


def set_worker_title(title: str) -> None:
    """Show this fork of a helper under this title, and give it the name of the program, a Python, again.

    A worker that stays in another attempt does the same again.
    """
    from raylaunch.worker.runtime import process_setup  # noqa: PLC0415  # the subreaper stays small

    process_setup.title_setters[:] = [set_worker_title]
    _set_title(title, _original()[2])


def _set_title(title: str, name: bytes) -> None:
    """Overwrite the command line, as far as the title fits into it.

    If the last byte is not zero, the kernel shows what is before the first zero byte. In a fork, this takes 0.1 ms for
    the first writes to memory that it shares with its parent; all else takes 6 microseconds.
    """
    _PRCTL(_PR_SET_NAME, name, 0, 0, 0)
    start, size, _ = _original()
    if size:
        ctypes.memmove(start, title.encode(errors="replace")[: size - 2].ljust(size - 1, b"\0") + b".", size)


@functools.cache
def _original() -> tuple[int, int, bytes]:
    """Return where the command line is in memory, its length, and the name; length 0: it cannot be found out.

    Forks have it at the same place.
    """
    try:
        name = Path("/proc/self/comm").read_bytes().removesuffix(b"\n")
        fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        is_there = start > 0 and len(Path("/proc/self/cmdline").read_bytes()) == end - start > 1
    except (OSError, IndexError, ValueError):
        return 0, 0, b"python"
    return (start, end - start, name) if is_there else (0, 0, name)
