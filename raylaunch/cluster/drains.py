"""Hosts that are being drained: Ray has no word for it that comes by itself, so it is asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from ray._private import state
from ray.exceptions import RayError

from raylaunch.cluster.fleet import Draining

_draining_nodes = state.state.get_draining_nodes  # private: one without it is told of when this is imported
_UNKNOWN_DEADLINE_SECONDS = 120.0
"""Assumed of a notice without a deadline: the usual notice of a cloud."""
_LEAST_SECONDS = 10.0
"""Assumed where there are none left: to save in vain costs no more than not to save."""


class Notices:
    """What was told already: each notice is one word, and another where its deadline is moved."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def fresh(self, found: Mapping[str, int], wall: float, monotonic: float) -> list[Draining]:
        """`found`: by host, what Ray has: a deadline in milliseconds since 1970, or 0. `wall`, `monotonic`: now."""
        unheard = {host: deadline for host, deadline in found.items() if self._told.get(host) != deadline}
        self._told = dict(found)
        return [_draining(host, deadline / 1000, wall, monotonic) for host, deadline in unheard.items()]


def _draining(host: str, deadline: float, wall: float, monotonic: float) -> Draining:
    if not deadline:
        why = f"its host is being drained, no deadline is given, {_UNKNOWN_DEADLINE_SECONDS:g} s are assumed"
        return Draining(host=host, deadline=monotonic + _UNKNOWN_DEADLINE_SECONDS, why=why)
    left = deadline - wall
    if left <= 0:  # of a notice that is a second old: the machines' clocks are not the same
        why = f"its host is being drained, {_LEAST_SECONDS:g} s are assumed, since its deadline is past by our clock"
        return Draining(host=host, deadline=monotonic + _LEAST_SECONDS, why=why)
    why = f"its host is being drained, {left:.0f} s are left"
    return Draining(host=host, deadline=monotonic + left, why=why)


class DrainWatch:
    """Asks in a thread of its own, whenever it is told to `look`, until `close`."""

    def __init__(self, found: Callable[[Mapping[str, int]], None]) -> None:
        """`found` is called with every answer."""
        self._found = found
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="raylaunch-drains")

    def start(self) -> None:
        """From here on it can be told to."""
        self._thread.start()

    def look(self) -> None:
        """The head is there: ask it. Of one that was started anew Ray bears no such question, and ends this process."""
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closed:
            self._wanted.clear()
            with contextlib.suppress(RayError, RuntimeError):  # the head does not answer; it is asked again
                self._found(_draining_nodes())

    def close(self) -> None:
        """Ask no more. A question that hangs is left behind."""
        self._closed = True
        self._wanted.set()


def now(found: Mapping[str, int], notices: Notices) -> list[Draining]:
    """The notices that are not told yet, by the clocks of this process."""
    return notices.fresh(found, time.time(), time.monotonic())
