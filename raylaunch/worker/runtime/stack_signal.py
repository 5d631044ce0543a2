"""The signals on which a worker writes the stack of its main thread, or of all threads.

faulthandler's C code writes them, so a worker answers even while it holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

from raylaunch.worker.runtime.server_file import ServerFile

STACK_SIGNAL: Final = signal.SIGRTMIN + 9
ALL_STACKS_SIGNAL: Final = signal.SIGRTMIN + 11
"""Their default action ends a process, so they are only sent to one that has handlers for them (`procfs.catches`).

faulthandler reads the frames of threads that run meanwhile if all are wanted, and the process may end by SIGSEGV.
"""

_MOST_DIGITS = 16


def register(file: ServerFile) -> None:
    """Append stacks to the file on each of the signals, by its descriptor, which must stay open.

    The first line of the file says which one that is.
    """
    file.append(b"%d\n" % file.fd)
    faulthandler.register(STACK_SIGNAL, file=file.fd, all_threads=False, chain=False)
    faulthandler.register(ALL_STACKS_SIGNAL, file=file.fd, all_threads=True, chain=False)


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
