"""What a driver of a detached run leaves to the next one: the state that agents keep."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raylaunch.cluster.agent.agent import AgentSpec
from raylaunch.cluster.driver.run_folder import FolderState
from raylaunch.cluster.fleet.detached_fleet import FleetState
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import NO_HOST, HostId, NodeId
from raylaunch.core.placement.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change in a run, as far as a driver needs it."""

    request: bytes
    """The `DetachedRun`, and what runs it, pickled."""
    asked: Job
    job: Job
    """As it was asked for, and with the numbers that the plan has for it."""
    plan: Plan
    run_id: str
    began: str
    """The time of day, in ISO 8601."""
    spec: AgentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """All that another driver needs to go on with a run."""

    facts: RunFacts
    parts: bytes
    """The machine and what else has a state in the driver, pickled by `StatePickler`."""
    hosts: dict[NodeId, HostId]
    """Of the nodes that are up."""
    lost: tuple[NodeId, ...]
    fleet: FleetState
    folder: FolderState
    now: float
    """Seconds since the run began."""
    wall: float
    clock: float
    """`time.time()` and `time.monotonic()` at that moment."""
    host: HostId = NO_HOST
    """Of that driver."""
    is_driver_gone: bool = False
    """Whether an agent has seen the end of that driver's process. The driver that takes over sets it."""

    def clock_shift(self) -> float:
        """Return what to add to a time.monotonic() of that driver's host to have it as one of this host."""
        return time.monotonic() - self.clock - (time.time() - self.wall)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverFacts:
    """What a driver that takes over knows of the time before it."""

    driver: int
    process_seconds: float
    state_seconds: float
    """See `DriverReplaced`."""
    found_at: float
    """The time.monotonic() at which it had the state."""


def load(state: bytes) -> DriverState:
    """Return the state that these bytes are. They are pickles: only agents of the run have them."""
    found: DriverState = pickle.loads(state)  # noqa: S301
    return found


class StatePickler(pickle.Pickler):
    """Leaves out what the next driver makes anew: it is pickled by name."""

    def __init__(self, file: io.BytesIO, context: Mapping[str, object]) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in context.items()}

    def persistent_id(self, obj: object) -> str | None:
        return self._names.get(id(obj))


class StateUnpickler(pickle.Unpickler):
    """Puts in what this driver has made anew."""

    def __init__(self, file: io.BytesIO, context: Mapping[str, object]) -> None:
        super().__init__(file)
        self._context = context

    def persistent_load(self, pid: Any) -> object:
        return self._context[pid]
