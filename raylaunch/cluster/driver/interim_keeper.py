"""An actor that keeps the ledger of a detached run while no agent does: before any is up, after all are lost.

The actor runs on another host than the driver if there is one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster import named_resources
from raylaunch.cluster.registry_key import NAMESPACE

TITLE = "raylaunch: interim keeper"
"""What `ps` shows of it, after `ray::`."""
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterimState:
    """What an interim keeper keeps. `ledger` is empty as long as the run has only been requested."""

    request: bytes = field(default=b"", repr=False)
    """See `RunFacts`."""
    kept: tuple[int, int] = (0, 0)
    """The epoch and the generation of the ledger."""
    ledger: bytes = field(default=b"", repr=False)
    epoch: int = 1
    """That which the driver that asks for it may have."""


class InterimKeeper:
    """Keeps the newest ledger until the driver ends it. If there is no driver for `driver_timeout`, it ends the run."""

    def __init__(self, token: str, driver_timeout: float) -> None:
        type(self).__name__ = TITLE
        self._token = token
        self._driver_timeout = driver_timeout
        self._found = InterimState()
        self._epoch = 1
        threading.Thread(target=self._watch, daemon=True, name="raylaunch-interim").start()

    def keep(self, found: InterimState) -> bool:
        """Keep this, unless what is kept is newer."""
        if found.kept >= self._found.kept:
            self._found = found
        return True

    def look(self) -> InterimState:
        """Return what is kept, for a driver that takes over: each has an epoch of its own."""
        self._epoch = max(self._epoch, self._found.kept[0]) + 1
        return replace(self._found, epoch=self._epoch)

    def _watch(self) -> None:
        seen = time.monotonic()
        while time.monotonic() < seen + self._driver_timeout:
            if named_resources.has_driver(self._token):
                seen = time.monotonic()  # on a busy machine the answer takes a while
            time.sleep(min(_LOOK_SECONDS, self._driver_timeout / 2))
        named_resources.remove(self._token)


def keep(token: str, driver_timeout: float, found: InterimState) -> Any:
    """Give a ledger to the keeper; start one if there is none. Return Ray's reference to True. Raises RayError."""
    actor = (
        ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(InterimKeeper)
        .options(
            name=named_resources.interim_keeper_name(token),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=_elsewhere(),
        )
        .remote(token, driver_timeout)
    )
    return actor.keep.options(name=TITLE).remote(found)


def _elsewhere() -> object:
    """Return where it should run: on any other host than this process, if there is one."""
    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return NodeAffinitySchedulingStrategy(others[0], soft=True) if others else "DEFAULT"


def look(token: str, seconds: float) -> InterimState | None:
    """Return what is kept; None: there is nobody who keeps it. Raises RayError if it, or the head, does not answer."""
    actor = named_resources.actor(named_resources.interim_keeper_name(token))
    if actor is not None:
        with contextlib.suppress(ActorDiedError):
            found: InterimState = ray.get(actor.look.options(name=TITLE).remote(), timeout=seconds)
            return found if found.request or found.ledger else None  # else its driver died before it had told it
    return None


def end(token: str) -> None:
    """End it, if it is there: agents keep the ledger now."""
    named_resources.kill(named_resources.interim_keeper_name(token))
