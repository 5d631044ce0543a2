"""The command line of this process as others see it: in /proc, `ps`, and the dashboard of Ray, which reads it there."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Where the command line is in memory: fields of /proc/PID/stat (proc(5)), counted from the one after the name."""


def overwrite(redacted: Callable[[Sequence[str]], Sequence[object]]) -> None:
    """Overwrite the arguments of this process that `redacted` changes. It must return as many as it is given.

    The kernel reads them from the memory of the process. None gets longer; the end of one that gets shorter is filled
    with spaces. `sys.argv` and `sys.orig_argv` are copies, and stay. Does nothing where /proc cannot be read.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        before = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        words = before.removesuffix(b"\0").split(b"\0")
        shown = redacted([os.fsdecode(word) for word in words])
        after = b"\0".join(_fitted(str(new), word) for new, word in zip(shown, words, strict=True)) + b"\0"
        if start and len(before) == len(after) == end - start and before != after:
            ctypes.memmove(start, after, len(after))


def _fitted(text: str, before: bytes) -> bytes:
    """Return the text in as many bytes as there were before."""
    return os.fsencode(text)[: len(before)].ljust(len(before))
