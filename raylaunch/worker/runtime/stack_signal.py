"""The signal on which a worker writes the stacks of its threads.

faulthandler's C code writes them, so a worker answers even while it holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

from raylaunch.worker.runtime.server_file import ServerFile

STACK_SIGNAL: Final = signal.SIGRTMIN + 9
"""Its default action ends a process, so it is only sent to one that has a handler for it (`procfs.catches`)."""


_MOST_DIGITS = 16


def register(file: ServerFile) -> None:
    """Append the stacks of all threads to the file on each `STACK_SIGNAL`, by its descriptor, which must stay open.

    The first line of the file says which one that is.
    """
    file.append(b"%d\n" % file.fd)
    faulthandler.register(STACK_SIGNAL, file=file.fd, all_threads=True, chain=False)


def can_write(pid: int, file: int) -> bool:
    """Return whether the worker has this file open where its handler writes, as far as this process can see that.

    A script that has closed the descriptor may have a file of its own there, and the handler would write into that.
    """
    number = os.pread(file, _MOST_DIGITS, 0).split(b"\n")[0].decode(errors="replace")
    try:
        found = os.stat(f"/proc/{pid}/fd/{number}")
    except (OSError, ValueError):
        return False
    return number.isdecimal() and os.path.samestat(found, os.fstat(file))
