"""Hosts that are being drained: Ray has no word for it that comes by itself, so it is asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from ray._private import state
from ray.exceptions import RayError

from raylaunch.cluster.fleet import Draining

_SECONDS = 1.0
_UNKNOWN_DEADLINE_SECONDS = 120.0
"""Assumed of a notice without a deadline: the usual notice of a cloud."""


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
    why = f"its host is being drained, {max(0.0, left):.0f} s are left"
    return Draining(host=host, deadline=monotonic + left, why=why)


class DrainWatch:
    """Asks once a second, in a thread of its own, until `close`."""

    def __init__(self, found: Callable[[Mapping[str, int]], None]) -> None:
        """`found` is called with every answer."""
        self._found = found
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="raylaunch-drains")

    def start(self) -> None:
        """Ask for the first time at once."""
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(RayError, RuntimeError):  # the head does not answer; it is asked again
                self._found(state.state.get_draining_nodes())
            self._closed.wait(_SECONDS)

    def close(self) -> None:
        """Ask no more. A question that hangs is left behind."""
        self._closed.set()


def now(found: Mapping[str, int], notices: Notices) -> list[Draining]:
    """The notices that are not told yet, by the clocks of this process."""
    return notices.fresh(found, time.time(), time.monotonic())
