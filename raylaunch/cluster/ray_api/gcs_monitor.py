"""A monitor of the Ray cluster's head (its GCS), which ends a run in good order before Ray ends it in disorder.

Ray ends each of its processes, ours too, a minute after the head stopped answering, and at once if a head that was
started anew answers instead. If the head counts this machine as dead, Ray ends all that was started from here and
starts nothing more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping

import ray
from ray.exceptions import RayError

from raylaunch.cluster import ray_internals
from raylaunch.cluster.fleet_api import HostDraining
from raylaunch.core.newtypes import HostId
from raylaunch.errors import ClusterError

_PERIOD_SECONDS = 1.0
_ANSWER_SECONDS = 2
_RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAY_TIMEOUT_DEFAULT_SECONDS = 60.0
_TIMEOUT_SHARE = 0.5
"""Of Ray's timeout: it takes some seconds to notice that the head is gone, and some to end a run."""
_UNKNOWN_DEADLINE_SECONDS = 120.0
"""Assumed if a notice has no deadline: what clouds usually give."""
_LEAST_SECONDS = 10.0
"""Assumed if the deadline is past: a checkpoint in vain costs no more than none."""


def is_same_head(seconds: float) -> bool:
    """Return whether the head that answers is the one this process connected to.

    Raises an exception of Ray's if none answers within `seconds`.
    """
    return ray_internals.head_session(seconds) == ray_internals.own_session()


def head_timeout() -> float:
    """Return the seconds without an answer of the head after which a run ends: half of what Ray itself waits."""
    try:
        return float(os.environ[_RAY_TIMEOUT]) * _TIMEOUT_SHARE
    except (KeyError, ValueError):
        return _RAY_TIMEOUT_DEFAULT_SECONDS * _TIMEOUT_SHARE


class GcsMonitor:
    """Asks the head once a second, in a thread of its own, until `close`."""

    def __init__(self, on_answer: Callable[[], None], on_lost: Callable[[ClusterError], None]) -> None:
        """`on_answer` is called when the head answered, so that it is safe to ask it more right now.

        `on_lost` is called at most once, when the run has to end. Both are called in the monitor's thread.
        """
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._unanswered_since: float | None = None
        #: Ray's id for this process, as long as it is connected.
        self._job = ray.get_runtime_context().get_job_id()
        #: The time.monotonic() at which the head has said last that this host is alive: no other driver was started.
        self.answered_at = 0.0

    def start(self) -> None:
        """Start the thread, which asks for the first time at once."""
        threading.Thread(target=self.run, daemon=True, name="raylaunch-head").start()

    def close(self) -> None:
        """Stop asking. Does not wait for the thread."""
        self._closed.set()

    def run(self) -> None:
        """Ask until `close`, or until the run has to end."""
        while not self._closed.is_set():
            if error := self.check():
                self._on_lost(error)
                return
            self._closed.wait(_PERIOD_SECONDS)

    def check(self) -> ClusterError | None:
        """Ask once. Return why the run has to end; None: it can go on."""
        if not ray.is_initialized() or ray.get_runtime_context().get_job_id() != self._job:
            return ClusterError("this program has closed its connection to Ray, and so ended what it had there")
        try:
            is_same = is_same_head(_ANSWER_SECONDS)
            is_alive = not is_same or is_this_machine_alive()
        except Exception:  # noqa: BLE001
            now = time.monotonic()
            # Counted from the end of the first failed question, in which this process itself may have stood still.
            if self._unanswered_since is None:
                self._unanswered_since = now
            if now - self._unanswered_since < head_timeout():
                return None
            return _head_lost(f"it does not answer for {head_timeout():g} s")
        self._unanswered_since = None
        if not is_same:
            return _head_lost("it was started anew, and knows nothing of what ran before")
        if not is_alive:
            return _machine_dead()
        self.answered_at = time.monotonic()
        self._on_answer()
        return None


def is_this_machine_alive() -> bool:
    """Return whether the head counts this machine as alive. Raises an exception of Ray's if it does not answer."""
    try:
        return ray_internals.is_this_node_alive(_ANSWER_SECONDS)
    except ray_internals.UNEXPECTED:  # this Ray cannot be asked, as a person was told when this process connected
        return True


def _head_lost(why: str) -> ClusterError:
    return ClusterError(
        f"the head of the Ray cluster is gone: {why}",
        hint="without it Ray ends all that runs there; start the run again when it is back, from its last checkpoint\n"
        "a head that has an external storage (RAY_REDIS_ADDRESS) may be started again without an end of runs",
    )


def _machine_dead() -> ClusterError:
    return ClusterError(
        "Ray on this machine is gone, and with it all that was started from here",
        hint="`raylet.out` in Ray's folder for logs may say why; start the run again, from its last checkpoint",
    )


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

    def __init__(self, on_answer: Callable[[Collection[HostId], list[HostDraining]], None]) -> None:
        """`on_answer` is called in the thread with each answer: all hosts that are drained, and what is new of them."""
        self._on_answer = on_answer
        self._notices = DrainNotices()
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
                found = ray_internals.draining_nodes()
                self._on_answer(found.keys(), self._notices.new(found))

    def close(self) -> None:
        """Stop asking. Does not wait for a question that hangs."""
        self._closed = True
        self._wanted.set()
