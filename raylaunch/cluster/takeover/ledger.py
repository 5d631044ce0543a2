"""The ledger of a detached run: what its driver writes down for the next one. Agents keep the newest."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass

from raylaunch.cluster.agent.agent import AgentSpec
from raylaunch.cluster.driver.driver_ledger import DriverLedger
from raylaunch.cluster.driver.run_folder import FolderState
from raylaunch.cluster.fleet.allocator import Allocator
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import NO_HOST, HostId
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
class Ledger:
    """All that another driver needs to go on with a run, besides what the agents tell: their goals and statuses.

    It is plain data, without handles, threads and clocks of a process.
    """

    facts: RunFacts
    decisions: DriverLedger
    slots: Allocator
    """Which node is in which slot, on which host, and which hosts are cordoned."""
    folder: FolderState
    now: float
    """Seconds since the run began."""
    wall: float
    clock: float
    """`time.time()` and `time.monotonic()` at that moment."""
    host: HostId = NO_HOST
    """Of that driver."""

    def clock_shift(self) -> float:
        """Return what to add to a time.monotonic() of that driver's host to have it as one of this host."""
        return time.monotonic() - self.clock - (time.time() - self.wall)

    def began_at(self) -> float:
        """Return the time.monotonic() of this process at which the run began."""
        return time.monotonic() - self.now - max(0.0, time.time() - self.wall)


def dump(ledger: Ledger) -> bytes:
    """Return a ledger as bytes, for `load`."""
    return pickle.dumps(ledger)


def load(message: bytes) -> Ledger:
    """Return the ledger that these bytes are. They are pickles: only agents of the run have them."""
    ledger: Ledger = pickle.loads(message)  # noqa: S301
    return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverFacts:
    """What a driver that takes over knows of the time before it."""

    driver: int
    process_seconds: float
    state_seconds: float
    """See `DriverReplaced`."""
    found_at: float
    """The time.monotonic() at which it had the ledger."""
    is_driver_gone: bool
    """Whether an agent has seen the end of the last driver's process."""
