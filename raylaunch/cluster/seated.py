"""What all fleets have in common: seats that say who is to be where, and orders that go to one node each."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.deeds import Deed, Man
from raylaunch.cluster.fleet import Tell
from raylaunch.cluster.seats import Seats
from raylaunch.core.plan import Plan
from raylaunch.core.ranks import Assignment, Rendezvous

Answer = TypeVar("Answer")


class SeatedFleet(ABC):
    """How a deed is done, and how a node is given an order, is up to the fleet: `_put` and `_order` are its own."""

    def __init__(self, plan: Plan, told: AgentSettings, say: Callable[[str], None]) -> None:
        """`say`: takes a line for a person, in the thread that calls us."""
        self._told = told
        self._say = say
        self._seats = Seats(plan.bundles, plan.min_nodes, spread=plan.spread)
        self._up: set[str] = set()
        self._tell: Tell = lambda _: None
        #: Guards `_seats`, and the order in which its deeds are put away.
        self._lock = threading.Lock()

    @abstractmethod
    def _put(self, deed: Deed) -> None:
        """Have it done after all that were put before. Nobody waits for it."""

    @abstractmethod
    def _order(self, node: str, name: str, *args: Any) -> None:
        """Have the agent of a node do what its method of that name does. It may be gone: then nothing happens."""

    # Orders.

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        """Start a node's part of an attempt."""
        self._order(node, "launch", part, meeting)

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        """End the attempt's workers there."""
        self._order(node, "stop", attempt, grace, signal)

    def forward(self, node: str, attempt: int, signal: str) -> None:
        """Send them a signal that is not ours."""
        self._order(node, "forward", attempt, signal)

    def open_store(self, node: str, attempt: int) -> None:
        """Have a store ready there."""
        self._order(node, "open_store", attempt)

    def ask_checkpoint(self, node: str, attempt: int, step: int) -> None:
        """Propose a step to save at."""
        self._order(node, "ask_checkpoint", attempt, step)

    def settle(self, node: str, attempt: int, step: int) -> None:
        """Have them save at the step that was proposed."""
        self._order(node, "settle", attempt, step)

    def dump_stacks(self, node: str, attempt: int) -> None:
        """Have it tell what they are doing."""
        self._order(node, "dump_stacks", attempt)

    # Which nodes there are.

    def joined(self, node: str, node_id: str) -> bool:
        """Remember where it is; whoever else was asked for in its stead is taken back."""
        wanted = self._decide(partial(self._seats.joined, node, node_id))
        if wanted:
            self._up.add(node)
        return wanted

    def shun(self, host: str) -> None:
        """What is asked for there is taken back."""
        self._decide(partial(self._seats.shun, host))

    def readmit(self, host: str) -> None:
        """It may be used again."""
        self._decide(partial(self._seats.readmit, host))

    def _decide(self, ask: Callable[[float], Answer]) -> Answer:
        """Tell the seats something, and have done what follows."""
        with self._lock:
            answer = ask(time.monotonic())
            for deed in self._seats.take():
                self._put(deed)
        return answer

    def _wake(self, now: float) -> float | None:
        """When the seats are to be told that time has passed, if they are told nothing else before."""
        with self._lock:
            return self._seats.wake(now)

    def _settings(self, deed: Man) -> AgentSettings:
        """What the agent is told that is to be there."""
        settings = replace(self._told.settings, node=deed.node)
        return replace(self._told, nproc=deed.bundle.nproc, settings=settings)
