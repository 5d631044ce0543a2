"""Fork a child that starts over at the bottom of the stack.

A forked child has its parent's call stack. If it ran its own work on top of it, it could not return, and so could not
end as an interpreter does, with exit handlers, threads joined and buffers written. So `fork` raises `BecomeChild` in
the child, which unwinds the stack, and `run_at_bottom` calls what the exception carries.
"""

from __future__ import annotations

import os
from collections.abc import Callable

Run = Callable[[], int]
"""What a process does. Returns its exit code."""


class BecomeChild(BaseException):
    """Raised in a forked child. `run` is what the child does instead of going on."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


def fork(run: Run) -> int:
    """Fork a child that does this. Returns its process id; in the child, raises `BecomeChild`. Raises OSError."""
    pid = os.fork()
    if pid == 0:
        raise BecomeChild(run)
    return pid


def run_at_bottom(run: Run) -> int:
    """Do this, and in every child that it forks, what that child was forked for. Returns the process's exit code."""
    while True:
        try:
            return run()
        except BecomeChild as child:
            run = child.run
