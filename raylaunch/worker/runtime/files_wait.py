"""Lets a worker wait, before its script begins, until RAYLAUNCH_FAST_DIR has the files that its rank had elsewhere."""

from __future__ import annotations

import os
import time

from raylaunch.worker.heartbeats import slot_owner
from raylaunch.worker.heartbeats.shared_page import FILES_READY, PAGE_VARIABLE, SharedPage

FOLDER_VARIABLE = "RAYLAUNCH_FAST_DIR"
"""In a worker's environment: a folder for files, in memory of the node."""
WAIT_VARIABLE = "RAYLAUNCH_AWAITS_FILES"
"""In a worker's environment: `1` if its agent is getting files of other nodes. The script does not see it."""
_POLL_SECONDS = 0.005


def wait() -> None:
    """Wait until the agent has all files, or has given up; it says so then. If the agent dies, so does this process."""
    page = os.environ.get(PAGE_VARIABLE, "").rpartition(":")[0]
    if not os.environ.pop(WAIT_VARIABLE, "") or not page:
        return
    numbers, attempt = SharedPage.open(page).numbers, int(os.environ[slot_owner.ATTEMPT_VARIABLE])
    while numbers[FILES_READY] < attempt:
        time.sleep(_POLL_SECONDS)
