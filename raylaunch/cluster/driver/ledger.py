"""The ledger of a detached run: what its driver writes down for the next one. Agents keep the newest."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from math import inf

from raylaunch.cluster.agent.agent_session import SUCCESSION_SECONDS
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.run_folder import FolderState
from raylaunch.cluster.fleet.allocator import Allocator
from raylaunch.core.job.job import Job
from raylaunch.core.machine.run_state import Run
from raylaunch.core.newtypes import NO_HOST, HostId
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.node_spec import AgentSpec


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
class DriverLedger:
    """What a driver writes down of its decisions, for a driver that goes on with the run.

    Plain data: whatever a process has besides, the next one makes anew of this and of what nodes tell.
    """

    run: Run
    """Attempt, roster, spent restarts, excluded hosts, requested bounds: all that the machine decides by."""
    warned: frozenset[str]
    """What a person was told of nodes."""
    calls_should_checkpoint: bool
    """As in `ProgressMonitor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All that another driver needs to go on with a run, besides what the agents tell: their goals and statuses.

    It is plain data, without handles, threads and clocks of a process.
    """

    facts: RunFacts
    decisions: DriverLedger
    allocator: Allocator
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
class LastDriver:
    """The driver after which this one goes on, and what is known of the time since then."""

    ledger: Ledger
    driver: int
    process_seconds: float
    state_seconds: float
    """See `DriverReplaced`. `driver` is the number of this one."""
    found_at: float
    """The time.monotonic() at which the ledger was found."""
    is_gone: bool
    """Whether an agent has seen the end of the last driver's process."""

    def assume_nodes(self, nodes: NodeRegistry, now: float) -> None:
        """Take over its nodes, each of which may go on for a while without any driver.

        If the last driver may be alive, its host stands still or is cut off, perhaps with others. If its process has
        ended, a node may have seen that before it was cut off, and go on for a minute. Only a host of which both the
        driver's process and the raylet have ended is dead: Ray's report alone is no proof for the others.
        """
        run = self.ledger.decisions.run
        for node, member in run.nodes.items():
            is_proof = self.is_gone and member.host == self.ledger.host
            lives = inf if self.is_gone else self.ledger.facts.job.node_timeout  # then that driver has missed others
            nodes.assume(node, member.host, now + SUCCESSION_SECONDS, outlives_report=0.0 if is_proof else lives)
