"""The signal on which a worker writes the stacks of its threads.

faulthandler's C code writes them, so a worker answers even while it holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import signal
from typing import Final

STACK_SIGNAL: Final = signal.SIGRTMIN + 9
"""Its default action ends a process, so it is only sent to one that has a handler for it (`procfs.catches`)."""


def register(fd: int) -> None:
    """Append the stacks of all threads to the file `fd`, which must stay open, on each `STACK_SIGNAL`."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
