"""What all fleets have in common: an allocator that decides which agents run where."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from raylaunch.cluster.fleet.allocator import Allocator, Request, StartAgent
from raylaunch.cluster.fleet_api import Tell
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.node_goal import Order
from raylaunch.node.protocol.node_spec import AgentSpec

Answer = TypeVar("Answer")


class FleetBase(ABC):
    """How a request is done, and how a node is sent an order, is up to the fleet: `_put` and `send` are its own."""

    def __init__(
        self,
        plan: Plan,
        spec: AgentSpec,
        say: Callable[[str], None],
        *,
        start_timeout: float = math.inf,
        allocator: Allocator | None = None,
    ) -> None:
        """`say` takes a line for a person. It is called in the thread that calls a method of the fleet.

        `start_timeout`: see `Allocator`. `allocator`: of another driver, with which this one goes on.
        """
        self._spec = spec
        self._say = say
        self._allocator = allocator or Allocator(
            plan.bundles, plan.min_nodes, spread=plan.spread, start_timeout=start_timeout
        )
        self._tell: Tell = lambda _: None
        #: Guards `_allocator`, and the order in which its requests are queued.
        self._lock = threading.Lock()

    @abstractmethod
    def _put(self, request: Request) -> None:
        """Queue a request of the allocator's. Requests are done in order, in a thread of the fleet's."""

    @abstractmethod
    def send(self, node: NodeId, order: Order) -> None:
        """Send an order to a node's agent, without waiting. Does nothing where the node has no agent any more."""

    # Which nodes there are.

    def joined(self, node: NodeId, host: HostId) -> bool:
        """Accept an agent that is ready on this host. False: it is not needed there, and was ended."""
        return self._decide(partial(self._allocator.joined, node, host))

    def cordon(self, host: HostId) -> None:
        """Reserve nothing more on this host."""
        self._decide(partial(self._allocator.cordon, host))

    def uncordon(self, host: HostId) -> None:
        """Allow reservations on the host again."""
        self._decide(partial(self._allocator.uncordon, host))

    def scale(self, nodes: int) -> None:
        """Set the number of nodes from now on."""
        self._decide(partial(self._allocator.scale, nodes))

    def _decide(self, ask: Callable[[float], Answer]) -> Answer:
        """Call a method of the allocator with the time, and queue the requests that follow from it."""
        with self._lock:
            answer = ask(time.monotonic())
            for request in self._allocator.take_requests():
                self._put(request)
        return answer

    def _wake(self, now: float) -> float | None:
        """Return when the allocator is to be ticked, as time.monotonic(); None: never."""
        with self._lock:
            return self._allocator.next_tick(now)

    def _spec_for(self, request: StartAgent) -> AgentSpec:
        return replace(self._spec, node=request.node, nproc=request.bundle.nproc)
