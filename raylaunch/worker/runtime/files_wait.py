"""Lets a worker wait until RAYLAUNCH_FAST_DIR has the files that its rank had elsewhere.

A new one waits before its script begins, and a survivor before it calls its elastic function again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from raylaunch.worker.heartbeats.shared_page import FILES_READY, PAGE_VARIABLE, SharedPage

FOLDER_VARIABLE = "RAYLAUNCH_FAST_DIR"
"""In a worker's environment: a folder for files, in memory of the node."""
WAIT_VARIABLE = "RAYLAUNCH_AWAITS_FILES"
"""In a worker's environment: its attempt, if its agent is getting files of other nodes. The script does not see it."""
_POLL_SECONDS = 0.005


def wait() -> None:
    """Wait until the agent has all files, or has given up; it says so then. If the agent dies, so does this process."""
    are_there = awaited()
    while not are_there():
        time.sleep(_POLL_SECONDS)


def awaited() -> Callable[[], bool]:
    """Return a function that tells whether the agent has all files. The environment says whether it lacks any.

    The variable that says so is removed, so this is called once in an attempt.
    """
    attempt, page = int(os.environ.pop(WAIT_VARIABLE, "0")), os.environ.get(PAGE_VARIABLE, "").rpartition(":")[0]
    if not attempt or not page:
        return lambda: True
    numbers = SharedPage.open(page).numbers
    return lambda: numbers[FILES_READY] >= attempt
