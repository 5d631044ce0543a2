"""How long a node may go on with nothing heard of the driver: never longer than the driver believes in it.

The driver takes a node for lost when `node_timeout` has passed since an answer of its agent arrived. An answer that
was sent at a time A did not arrive before A; so an agent that knows of one that did arrive knows that its node counts
until A + `node_timeout` at least, whatever the driver's clock says. It knows by the driver's next call, which comes
when the answer has come. Calls that wait while the driver or this process stands still change nothing: a lease that is
over is not renewed, since the workers may have ended by it.

The agent's clock is one that goes on while its machine sleeps: the driver's does.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

from raylaunch.worker.page import lease_clock

_PART = 0.9
"""Of `node_timeout`: clocks are not equally fast, and the end of workers takes a moment."""
_FIRST_CALL_SECONDS = 60.0
"""A driver that never calls is gone."""
_FAREWELL_SECONDS = 20.0
"""What an orderly end may take."""
_LOOK_SECONDS = 1.0
"""Whoever waits for longer does not see in time that the machine slept: the time in between is not waited for."""


class Lease:
    """Kept by the agent. Its end is a thread's affair, so a loop that is stuck in a dead file system ends too."""

    def __init__(self, node_timeout: float, renew: Callable[[int], None], end: Callable[[], None]) -> None:
        """`renew` tells the workers until when (`lease_clock`) they may go on; `end` ends this process.

        Infinity: neither is ever needed, since the driver is this process.
        """
        self._seconds = node_timeout * _PART
        self._renew = renew
        self._end = end
        #: When the last answer was sent.
        self._answered: float | None = None
        self._until = 0.0
        self._begun = threading.Event()
        self._released = threading.Event()

    def start(self) -> None:
        """From here on its end is this process's end."""
        if math.isinf(self._seconds):
            return
        threading.Thread(target=self._watch, daemon=True, name="raylaunch-lease").start()

    @property
    def over(self) -> bool:
        """From here on the driver may believe that this node is gone, so it must hear nothing more of it."""
        return self._begun.is_set() and _now() >= self._until

    def called(self) -> None:
        """The driver calls, so the last answer has arrived."""
        if self._answered is not None and not self.over:
            self._extend(self._answered)

    def answering(self) -> None:
        """An answer is sent.

        The first needs no call after it: before it arrives the driver knows nothing of this node and starts no
        workers here.
        """
        now = _now()
        if self._answered is None:
            self._extend(now)
        self._answered = now

    def farewell(self) -> None:
        """The driver wants everything ended: no more calls will come, and none are needed."""
        self._until = _now() + _FAREWELL_SECONDS
        self._begun.set()

    def rest(self, seconds: float) -> None:
        """The run is over, and the driver will not call for so long. What is over stays over."""
        if not math.isinf(self._seconds) and not self.over:
            self._extend(_now() + seconds - self._seconds)

    def release(self) -> None:
        """Another lease takes its place."""
        self._released.set()

    def _extend(self, arrived: float) -> None:
        self._until = arrived + self._seconds
        if not math.isinf(self._until):
            self._renew(int(self._until * 1e9))
        self._begun.set()

    def _watch(self) -> None:
        self._begun.wait(_FIRST_CALL_SECONDS)
        while (left := self._until - _now()) > 0:
            if self._released.wait(min(left, _LOOK_SECONDS)):
                return
        self._end()


def _now() -> float:
    return lease_clock() / 1e9


def end_this_process() -> None:
    """The fork server notices, and ends all workers: the same way that a killed agent takes."""
    os._exit(1)
