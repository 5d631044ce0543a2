"""The lease of a node: how long it runs on without hearing from the driver. It expires before the driver gives up.

The driver takes a node for lost when `node_timeout` has passed since the last report of its agent arrived. A report
that was sent at a time A did not arrive before A. So if an agent knows that this report arrived, it knows that the
driver counts its node as alive until A + `node_timeout` at least, whatever the driver's clock says. It knows that by
the driver's next call, which the driver makes when it has the report. A call that waited while the driver or this
process was stopped changes nothing: an expired lease is not renewed, since the workers may have ended by it.

The lease's clock advances while the machine sleeps (CLOCK_BOOTTIME), as the driver's time does.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

from raylaunch.worker.heartbeats.shared_page import lease_clock

_PART = 0.9
"""The share of `node_timeout` that a lease lasts: clocks differ in speed, and killing workers takes a moment."""
FIRST_CALL_SECONDS = 60.0
"""How long the agent waits for the driver's first call before it ends."""
_CLOSE_SECONDS = 20.0
"""How long closing the node may take."""
_LOOK_SECONDS = 1.0
"""The thread looks at the clock this often: a wait does not count the time that the machine sleeps."""


MOST_SECONDS_BETWEEN_REPORTS = 1.0
_REPORTS_PER_TIMEOUT = 5


def report_interval(node_timeout: float) -> float:
    """Return the seconds after which an agent reports even if nothing happened."""
    return min(MOST_SECONDS_BETWEEN_REPORTS, node_timeout / _REPORTS_PER_TIMEOUT)


class Lease:
    """The agent's lease. A thread watches it, so that an event loop that hangs in a dead file system ends too."""

    def __init__(self, node_timeout: float, renew: Callable[[int], None], end: Callable[[], None]) -> None:
        """`renew` tells the node's processes until when they may live, in ns of `lease_clock`; `end` ends this process.

        `node_timeout` infinity: the driver is in this process, and neither is ever called.
        """
        self._seconds = node_timeout * _PART
        self._renew = renew
        self._end = end
        #: When the last report was sent.
        self._answered: float | None = None
        self._until = 0.0
        self._begun = threading.Event()
        self.released = threading.Event()

    def start(self) -> None:
        """Start the thread that ends this process when the lease expires."""
        if math.isinf(self._seconds):
            return
        threading.Thread(target=self._watch, daemon=True, name="raylaunch-lease").start()

    @property
    def expired(self) -> bool:
        """Whether the lease has expired: the driver may count the node as lost, so nothing more may be reported."""
        return self._begun.is_set() and _now() >= self._until

    def driver_called(self) -> None:
        """Note that the driver calls, and so has the last report. Renews the lease."""
        if self._answered is not None and not self.expired:
            self._extend(self._answered)

    def report_sent(self) -> None:
        """Note that a report is sent.

        The first report renews the lease at once: the driver starts no workers here before it arrives.
        """
        now = _now()
        if self._answered is None:
            self._extend(now)
        self._answered = now

    def node_closing(self) -> None:
        """Note that the driver closes this node and makes no more calls."""
        self._until = _now() + _CLOSE_SECONDS
        self._begun.set()

    def agent_idle(self, seconds: float) -> None:
        """Record that the agent is idle, and let the lease last this many seconds. An expired lease stays expired."""
        if not math.isinf(self._seconds) and not self.expired:
            self._extend(_now() + seconds - self._seconds)

    def release(self) -> None:
        """Stop watching: the lease of another agent takes its place."""
        self.released.set()

    def _extend(self, arrived: float) -> None:
        self._until = arrived + self._seconds
        if not math.isinf(self._until):
            self._renew(int(self._until * 1e9))
        self._begun.set()

    def _watch(self) -> None:
        self._begun.wait(FIRST_CALL_SECONDS)
        while (left := self._until - _now()) > 0:
            if self.released.wait(min(left, _LOOK_SECONDS)):
                return
        self._end()


def _now() -> float:
    return lease_clock() / 1e9


def end_this_process() -> None:
    """Exit at once. The fork server notices that, as if the agent had been killed, and kills all workers."""
    os._exit(1)
