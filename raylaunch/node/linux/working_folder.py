"""The working folder of this process, also where Ray has replaced it while the process runs."""

from __future__ import annotations

import os

_REMOVED = " (deleted)"
"""What the kernel adds to the path of a folder that was removed (proc_pid_cwd(5))."""


def current() -> str:
    """Return the working folder. If it was replaced by another one of the same path, go there first.

    Ray does that to a job of `ray job submit --working-dir`, once for each further raylet that unpacks the same files
    on the host. Raises OSError if there is none at the path.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        os.chdir(os.readlink("/proc/self/cwd").removesuffix(_REMOVED))
        return os.getcwd()
