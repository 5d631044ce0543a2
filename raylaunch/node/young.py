"""Signals for workers so young that they have no handler yet, and would end by what they may be waiting for."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from raylaunch.node import proc

PATIENCE = 10.0
"""Seconds a signal waits for a worker to answer it. Then it comes in any case, as it would from torchrun."""

_LOOK_SECONDS = 0.05
"""Nobody tells when a handler is there."""


class Young:
    """Signals that wait for their workers, each once, as the kernel would keep them."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._latest: dict[tuple[int, int], float] = {}

    def signal(self, pid: int, number: int) -> None:
        """At once, if the worker answers it."""
        if proc.answers(pid, number):
            os.kill(pid, number)
        else:
            self._latest.setdefault((pid, number), time.monotonic() + self._patience)

    def press(self, alive: Collection[int]) -> None:
        """Signal those who answer by now, or were waited for long enough; forget those who are gone."""
        for (pid, number), latest in list(self._latest.items()):
            if pid not in alive:
                del self._latest[pid, number]
            elif proc.answers(pid, number) or time.monotonic() >= latest:
                del self._latest[pid, number]
                os.kill(pid, number)

    def until_look(self) -> float | None:
        """Seconds until `press` has something to do."""
        return _LOOK_SECONDS if self._latest else None
