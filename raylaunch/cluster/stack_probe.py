"""A sample of what all workers do: their stacks, of which each node sends its own."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from raylaunch.core.failures.stacks import Stack
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.protocol.node_goal import DumpStacks, Order
from raylaunch.node.protocol.node_status import StacksDumped

ANSWER_SECONDS = 2.0
"""How long nodes have to answer. A node that does not is left out of the report."""


class StackProbe:
    """One sample of all workers' stacks. Times are seconds since the run began."""

    def __init__(self, parts: Sequence[Assignment], send: Callable[[NodeId, Order], None]) -> None:
        """`send` sends an order to a node."""
        self._send = send
        self._parts = parts
        self.attempt = parts[0].attempt

    def sample(self, now: float, in_full: Container[int] = ()) -> None:
        """Ask all nodes for a sample. `in_full`: the ranks that write the stacks of all threads: see `DumpStacks`."""
        self.began_at = now
        self._missing = {part.node for part in self._parts}
        self.stacks: list[Stack] = []
        for part in self._parts:
            ranks = tuple(rank for rank in part.ranks if rank in in_full)
            self._send(part.node, DumpStacks(attempt=self.attempt, in_full=ranks))

    def answered(self, answer: StacksDumped) -> None:
        """Take a node's part of the sample."""
        if answer.attempt == self.attempt and answer.node in self._missing:
            self._missing.remove(answer.node)
            self.stacks.extend(answer.stacks)

    @property
    def unheard_ranks(self) -> tuple[int, ...]:
        """The ranks of the nodes that have not answered."""
        return tuple(rank for part in self._parts if part.node in self._missing for rank in part.ranks)

    @property
    def next_check(self) -> float:
        """When the sample is complete: now, if all nodes have answered, or when they have had the time to."""
        return self.began_at + ANSWER_SECONDS if self._missing else 0.0
