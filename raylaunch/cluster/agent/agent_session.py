"""What an agent records for the drivers of its run: the epoch, the newest goal, and the newest ledger.

Each driver that takes over has a higher epoch than all drivers before it. An agent obeys only the highest epoch that it
has seen, so a driver that was wrongly thought dead can do nothing more (a fencing token). The next driver goes on with
the goal that the agent has, and with the newest ledger of all agents.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from raylaunch.node.protocol.node_goal import NodeGoal, Order

SUCCESSION_SECONDS = 100.0
"""How long a node goes on by itself when its driver's process is gone, and not longer: the next one counts on that.

Ray takes up to 65 s to notice that a host was powered off. It starts the next driver only then if that was the host of
the last one, or if it had chosen that host for the next one.
"""
SUPERSEDED = "another driver has taken over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What an agent tells a driver that takes over."""

    epoch: int
    """The highest that it has seen."""
    kept: tuple[int, int] = (0, 0)
    ledger: bytes = field(default=b"", repr=False)
    """The ledger that it keeps, and the epoch and generation of the goal with which that came; zeros: none."""
    goal: NodeGoal = field(default_factory=NodeGoal, repr=False)
    """The newest that it was shown."""
    has_begun: bool = True
    """False: it waits for its `AgentSpec`; the driver that started it died before it had sent that."""
    saw_end: bool = False
    """Whether the link to its driver has ended: that driver's process is gone."""
    is_over: bool = False
    """Whether its lease has expired: all workers of the node have ended."""
    alone: float = 0.0
    """For how many seconds its driver has been gone, as far as it knows."""


class SupersededError(Exception):
    """A driver with a higher epoch is in command."""


class AgentSession:
    """The record of one agent. Only the event loop of the agent calls it, but for `alone`, which any thread may."""

    def __init__(self, epoch: int = 0) -> None:
        """`epoch`: see `AgentSpec`."""
        self.epoch = epoch
        #: That of the last driver that has adopted this agent, or has started it.
        self._adopted = epoch
        self._goal = NodeGoal()
        #: Epoch and generation of the ledger.
        self._kept = (0, 0)
        self._ledger = b""
        self._alone_since: float | None = None
        self._saw_end = False
        #: Whether the node has ended, since its lease has expired.
        self.is_over = False

    def driver_gone(self) -> None:
        """Record that the link to the driver has ended."""
        self._alone_since, self._saw_end = time.monotonic(), True

    def node_ended(self) -> None:
        """Record that the lease has expired, and that the node has ended."""
        self.is_over = True
        self._alone_since = self._alone_since or time.monotonic()

    @property
    def alone(self) -> float:
        """For how many seconds the driver has been gone, as far as this agent knows."""
        since = self._alone_since
        return 0.0 if since is None else time.monotonic() - since

    def end_run(self) -> None:
        """Refuse all further calls of the driver: Ray may start one after the call by which it has ended the run."""
        self.check(self.epoch + 1)

    # What drivers say.

    def look(self) -> Adoption:
        """Return what a driver that is about to take over needs."""
        return Adoption(
            epoch=self.epoch,
            kept=self._kept,
            ledger=self._ledger,
            goal=self._goal,
            saw_end=self._saw_end,
            is_over=self.is_over,
            alone=self.alone,
        )

    def adopt(self, epoch: int) -> None:
        """Obey the driver of this epoch from now on. Raises SupersededError if another one has it, or a higher one.

        Ray may show that driver's first goals before this call.
        """
        if epoch <= self._adopted:
            raise SupersededError(SUPERSEDED)
        self.check(epoch)
        self._adopted = epoch
        self._alone_since, self._saw_end = None, False

    def check(self, epoch: int) -> None:
        """Raise SupersededError unless this is the epoch of the driver in command."""
        if epoch < self.epoch:
            raise SupersededError(SUPERSEDED)
        if epoch > self.epoch:
            if not self.epoch:
                self._adopted = epoch
            self.epoch = epoch

    def new_orders(self, epoch: int, goal: NodeGoal) -> Iterator[Order]:
        """Yield the orders of a goal that were not carried out yet.

        Raises SupersededError as `check` does.
        """
        self.check(epoch)
        done = self._goal.generation
        if goal.generation > done:
            self._goal = goal
        yield from goal.since(done)

    def keep(self, epoch: int, generation: int, ledger: bytes) -> None:
        """Keep the ledger that came with a goal, unless a newer one is kept."""
        if (epoch, generation) > self._kept:
            self._kept, self._ledger = (epoch, generation), ledger

    # What drivers are told.

    @property
    def kept(self) -> int:
        """The generation of the ledger that is kept, if it is of the driver in command; else 0."""
        epoch, generation = self._kept
        return generation if epoch == self.epoch else 0
