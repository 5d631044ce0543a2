"""The head of the cluster. Where it is gone for a minute, Ray ends each of its processes, ours too, in the middle of
whatever they do; and at once where one that was started anew answers in its place. A run ends before, in good order.
And where it takes this machine for dead, Ray ends all that was started from here, and starts nothing more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ray._private import worker as ray_worker
from ray.exceptions import AuthenticationError

from raylaunch.errors import ClusterError

_SECONDS = 1.0
_ANSWER_SECONDS = 2
_RAY_WAITS = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAY_WAITS_SECONDS = 60.0
_PART = 0.5
"""Of what Ray waits: to notice it takes some seconds, and so does the end of a run."""


def is_the_same(seconds: int) -> bool:
    """Whether what answers is the head that this process is connected to. Raises if nothing does within that time."""
    client = ray_worker.global_worker.gcs_client
    try:
        found = client.internal_kv_get(b"session_name", namespace=b"session", timeout=seconds)
    except AuthenticationError:  # it does not know the cluster that we name
        return False
    return bytes(found or b"").decode() == str(ray_worker._global_node.session_name)  # noqa: SLF001


def counts_us(seconds: int) -> bool:
    """Whether the machine that this process is on belongs to its cluster. Raises as `is_the_same`."""
    worker = ray_worker.global_worker
    return all(worker.gcs_client.check_alive([worker.current_node_id], timeout=seconds))


def patience() -> float:
    """Seconds without a head that a run bears."""
    try:
        return float(os.environ[_RAY_WAITS]) * _PART
    except (KeyError, ValueError):
        return _RAY_WAITS_SECONDS * _PART


class HeadWatch:
    """Asks once a second, in a thread of its own, until `close`."""

    def __init__(self, answered: Callable[[], None], gone: Callable[[ClusterError], None]) -> None:
        """`answered`: it is there, and more may be asked of it right now. `gone`: it is, for good."""
        self._answered = answered
        self._gone = gone
        self._closed = threading.Event()
        self._missed: float | None = None

    def start(self) -> None:
        """Ask for the first time at once."""
        threading.Thread(target=self._run, daemon=True, name="raylaunch-head").start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            if error := self._look():
                self._gone(error)
                return
            self._closed.wait(_SECONDS)

    def _look(self) -> ClusterError | None:
        """Why there is no hope."""
        try:
            same = is_the_same(_ANSWER_SECONDS)
            ours = same and counts_us(_ANSWER_SECONDS)
        except Exception:  # noqa: BLE001
            now = time.monotonic()
            # From the end of the first that failed: this process may have stood still in the middle of it.
            self._missed = now if self._missed is None else self._missed
            return _gone(f"it does not answer for {patience():g} s") if now - self._missed >= patience() else None
        self._missed = None
        if not same:
            return _gone("it was started anew, and knows nothing of what ran before")
        if not ours:
            return _left_out()
        self._answered()
        return None


def _gone(why: str) -> ClusterError:
    return ClusterError(
        f"the head of the Ray cluster is gone: {why}",
        hint="without it Ray ends all that runs there; start the run again when it is back, from its last checkpoint",
    )


def _left_out() -> ClusterError:
    return ClusterError(
        "Ray on this machine is gone, and with it all that was started from here",
        hint="`raylet.out` in Ray's folder for logs may say why; start the run again, from its last checkpoint",
    )
