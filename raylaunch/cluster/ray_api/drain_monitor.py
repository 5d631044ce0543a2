"""A monitor of hosts that are being drained. Ray does not push such notices, so it is asked for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from ray.exceptions import RayError

from raylaunch.cluster import ray_internals
from raylaunch.cluster.fleet_api import HostDraining
from raylaunch.core.newtypes import HostId

_UNKNOWN_DEADLINE_SECONDS = 120.0
"""Assumed if a notice has no deadline: what clouds usually give."""
_LEAST_SECONDS = 10.0
"""Assumed if the deadline is past: a checkpoint in vain costs no more than none."""


class DrainNotices:
    """The notices seen so far, so that each is reported once, and again if its deadline changed."""

    def __init__(self) -> None:
        self._seen: dict[HostId, int] = {}

    def new(self, found: Mapping[HostId, int]) -> list[HostDraining]:
        """Return the notices that are new. `found`: deadlines in milliseconds since 1970, by host; 0: none is given."""
        wall, monotonic = time.time(), time.monotonic()
        new = {host: deadline for host, deadline in found.items() if self._seen.get(host) != deadline}
        self._seen = dict(found)
        return [_draining(host, deadline / 1000, wall, monotonic) for host, deadline in new.items()]


def _draining(host: HostId, deadline: float, wall: float, monotonic: float) -> HostDraining:
    if not deadline:
        why = f"its host is being drained, no deadline is given, {_UNKNOWN_DEADLINE_SECONDS:g} s are assumed"
        return HostDraining(host=host, deadline=monotonic + _UNKNOWN_DEADLINE_SECONDS, why=why)
    left = deadline - wall
    if left <= 0:  # the notice is a second old at most, so the two machines' clocks differ
        why = f"its host is being drained, {_LEAST_SECONDS:g} s are assumed, since its deadline is past by our clock"
        return HostDraining(host=host, deadline=monotonic + _LEAST_SECONDS, why=why)
    why = f"its host is being drained, {left:.0f} s are left"
    return HostDraining(host=host, deadline=monotonic + left, why=why)


class DrainMonitor:
    """Asks Ray which hosts are being drained, in a thread of its own, once for each `check`."""

    def __init__(self, on_answer: Callable[[Mapping[HostId, int]], None]) -> None:
        """`on_answer` is called in the thread with each answer: deadlines in milliseconds since 1970, by host."""
        self._on_answer = on_answer
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="raylaunch-drains")

    def start(self) -> None:
        """Start the thread that polls Ray for draining nodes."""
        self._thread.start()

    def check(self) -> None:
        """Let the thread ask once. Call this only when the head is known to be the same.

        Ray ends a process that asks a head which was started anew.
        """
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closed:
            self._wanted.clear()
            with contextlib.suppress(RayError, RuntimeError):  # the head does not answer; it is asked again
                self._on_answer(ray_internals.draining_nodes())

    def close(self) -> None:
        """Stop asking. Does not wait for a question that hangs."""
        self._closed = True
        self._wanted.set()
