"""Signals that wait until a worker has a handler for them.

A worker that has just been forked has none yet, and would be killed by a signal that its script is going to handle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from signal import Signals

from raylaunch.node.linux import procfs

PATIENCE = 10.0
"""Seconds that a signal waits for a handler. Then it is sent in any case, as torchrun would do at once."""

_POLL_SECONDS = 0.05
"""Between two checks: the kernel does not tell when a handler is installed."""


class DeferredSignals:
    """Signals by worker. The same signal waits only once for a worker, as a pending signal does in the kernel."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._latest: dict[tuple[int, Signals], float] = {}

    def signal(self, pid: int, number: Signals) -> None:
        """Send the signal at once if the process catches or ignores it, else defer it."""
        if procfs.catches_or_ignores(pid, number):
            os.kill(pid, number)
        else:
            self._latest.setdefault((pid, number), time.monotonic() + self._patience)

    def deliver(self, alive: Collection[int]) -> None:
        """Send what can be sent by now or has waited long enough. Signals for processes not in `alive` are dropped."""
        for (pid, number), latest in list(self._latest.items()):
            if pid not in alive:
                del self._latest[pid, number]
            elif procfs.catches_or_ignores(pid, number) or time.monotonic() >= latest:
                del self._latest[pid, number]
                os.kill(pid, number)

    def until_poll(self) -> float | None:
        """Return the seconds until `deliver` has something to do. None: nothing waits."""
        return _POLL_SECONDS if self._latest else None
