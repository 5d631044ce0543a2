"""What a worker is doing, written by itself when asked by a signal, even while it holds the interpreter's lock."""

from __future__ import annotations

import faulthandler
import signal
from typing import Final

SIGNAL: Final = signal.SIGRTMIN + 9
"""Asks for the stacks. Ends a process that does not listen for it: see `listens`."""


def register(fd: int) -> None:
    """Have the stacks of all threads appended to the file at each `SIGNAL`; the file is to stay open."""
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)


def listens(pid: int) -> bool:
    """Whether the process has something for `SIGNAL`: young ones, and programs that are no Python, have not."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
