"""What the driver tells a node: `NodeGoal`, all orders that the node is to carry out, of which the newest counts.

The driver creates an `Order`. `Fleet.send` carries it to the node's agent, which hands it to `Supervisor.handle`. No
order has a direct answer: what each one leads to is named below, and is in the node's status (`node_status`).

The supervisor passes some orders on to its fork server; see `forkserver_messages`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from raylaunch.core.newtypes import SIGTERM, NodeId, SignalName
from raylaunch.core.placement.environment import Assignment, Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilitySection:
    """A capability's section of a goal or a status, which replaces the one before; see `cluster/capability.py`."""

    capability: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWorkers:
    """Kill what is left of earlier attempts, then start this node's workers of the next one.

    What becomes of them is in the `WorkersStatus`.
    """

    assignment: Assignment
    rendezvous: Rendezvous
    staying: bool = False
    """Workers of the attempt before that can stay are not killed. They take part in the next one as they are."""
    has_survivors: bool = False
    """The same on any node of the attempt."""

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self.assignment.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Send all processes of the attempt the signal, and SIGKILL after `grace` seconds. Leads to `stopped`."""

    attempt: int
    grace: float
    signal: SignalName = SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers:
    """Send the signal to the attempt's workers, which go on running. Does nothing where the attempt has ended."""

    attempt: int
    signal: SignalName


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Have every worker of the attempt write the stack of its main thread. Leads to `StacksDumped`."""

    attempt: int
    in_full: tuple[int, ...] = ()
    """The ranks that write the stacks of all threads, at the risk of their end by SIGSEGV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Open the TCPStore of an attempt on this node. Leads to `StoreOpened`."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeCheckpoint:
    """Propose the step at which the attempt's workers save: phase one of two.

    Leads to `StepProposed`, or to `has_saved` in the status, without a step, where the script never asks
    `should_checkpoint`.
    """

    attempt: int
    step: int
    expected: bool = False
    """All workers of an earlier attempt have asked: one that has not yet is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Make the workers save at the step that was proposed last: phase two. Leads to `has_saved`."""

    attempt: int
    step: int


WorkerOrder = (
    LaunchWorkers | StopWorkers | SignalWorkers | DumpStacks | OpenStore | ProposeCheckpoint | CommitCheckpoint
)
"""What an agent passes on to its supervisor."""
Order = WorkerOrder | CapabilitySection


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGoal:
    """All orders to a node that still matter, each with its number. The newest goal has all that a node needs.

    So goals may be lost or come in any order, as the calls of an asynchronous Ray actor do, and another driver can show
    a node the same goal again.
    """

    generation: int = 0
    """Which goal of the driver's this is, and the number of an order with which it came; 0: there was none."""
    orders: tuple[tuple[int, Order], ...] = ()
    """In the order of their numbers."""

    def after(self, order: Order) -> NodeGoal:
        """Return the goal with one more order, which replaces each order that it makes pointless."""
        kept = [(number, other) for number, other in self.orders if not _replaces(order, other)]
        number = self.generation + 1
        return NodeGoal(generation=number, orders=(*kept, (number, order)))

    def since(self, generation: int) -> Iterator[Order]:
        """Yield what a node is to do that has carried out all orders up to this number."""
        for number, order in self.orders:
            if number > generation:
                yield order


def _replaces(order: Order, other: Order) -> bool:
    """Return whether a node needs not carry out `other` any more if it carries out `order`."""
    if isinstance(order, LaunchWorkers) and isinstance(other, WorkerOrder) and other.attempt < order.attempt:
        return True
    if type(order) is not type(other):
        return False
    if isinstance(order, OpenStore | StopWorkers) and isinstance(other, OpenStore | StopWorkers):
        return order.attempt == other.attempt
    if isinstance(order, SignalWorkers) and isinstance(other, SignalWorkers):
        return order.signal == other.signal
    if isinstance(order, CapabilitySection) and isinstance(other, CapabilitySection):
        return order.capability == other.capability
    return True


class NodeGoals:
    """The goals of all nodes, as a driver has them. Any thread may call its methods.

    The generations of all of them are of one count, so that the newest of what nodes keep can be told.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._goals: dict[NodeId, NodeGoal] = {}
        self._lock = threading.Lock()

    def add(self, node: NodeId, order: Order) -> NodeGoal:
        """Add an order to the goal of a node, and return the goal."""
        with self._lock:
            goal = self._goals[node] = replace(self.of(node), generation=self._generation).after(order)
            self._generation = goal.generation
            return goal

    def next_generation(self) -> int:
        """Return the generation of goals that are shown with something new beside the orders."""
        with self._lock:
            self._generation += 1
            return self._generation

    def of(self, node: NodeId) -> NodeGoal:
        """Return the goal of a node."""
        return self._goals.get(node, NodeGoal())

    def take_over(self, node: NodeId, goal: NodeGoal) -> NodeGoal:
        """Go on with the goal that an earlier driver has shown a node. Return it with what was added meanwhile."""
        with self._lock:
            for order in self.of(node).since(0):
                goal = goal.after(order)
            self._goals[node] = goal
            self._generation = max(self._generation, goal.generation)
        return goal
