"""What the kernel tells of what another process is doing."""

from __future__ import annotations

import contextlib
from pathlib import Path

GONE = "X"
"""The state of a process that is no more, as the kernel writes it."""


def state(pid: int) -> str:
    """One letter, as in /proc: `R` running, `S` sleeping, `T` stopped, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except OSError:
        return GONE


def holds_back(pid: int, number: int) -> bool:
    """Whether its main thread blocks the signal, as it does while it is in the handler."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, mask = line.partition(":")
            if name == "SigBlk":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False
