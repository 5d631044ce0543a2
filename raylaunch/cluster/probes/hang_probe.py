"""Probes of workers that are alive: the stacks of all, collected when a person requests them, when a hang is suspected,
or when a start is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raylaunch.core.failures.stacks import Stack, report
from raylaunch.core.machine.events_and_actions import WorkersHung
from raylaunch.core.monitoring.hang_cause import hung
from raylaunch.core.monitoring.hang_detector import SuspectedHang
from raylaunch.core.monitoring.hang_policy import LOOK_SECONDS, LOOKS, StackSample
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.protocol.messages import DumpStacks, Order, StacksDumped

ANSWER_SECONDS = 2.0
"""How long nodes have to answer. A node that does not is left out of the report."""


class StackProbe:
    """One sample of all workers' stacks. Times are seconds since the run began."""

    def __init__(self, parts: Sequence[Assignment], send: Callable[[NodeId, Order], None]) -> None:
        """`send` sends an order to a node."""
        self._send = send
        self._parts = parts
        self.attempt = parts[0].attempt

    def sample(self, now: float) -> None:
        """Ask all nodes for a sample."""
        self._began = now
        self._missing = {part.node for part in self._parts}
        self.stacks: list[Stack] = []
        for part in self._parts:
            self._send(part.node, DumpStacks(attempt=self.attempt))

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
        return self._began + ANSWER_SECONDS if self._missing else 0.0


class HangProbe(StackProbe):
    """One sample if that is enough, else several."""

    def __init__(self, hang: SuspectedHang, parts: Sequence[Assignment], send: Callable[[NodeId, Order], None]) -> None:
        super().__init__(parts, send)
        self.hang = hang
        self.samples: list[StackSample] = []

    @property
    def next_check(self) -> float:
        """When to call `sampled`, in seconds since the run began; 0: at once."""
        complete = super().next_check
        return complete if complete or self.hang.is_sure else self._began + LOOK_SECONDS

    def sampled(self, hang: SuspectedHang, now: float) -> bool:
        """Keep the sample. Return True if another one is needed, which is then begun. `hang`: its present state."""
        self.hang = hang
        self.samples.append(StackSample(at=self._began, stacks=tuple(self.stacks)))
        if hang.is_sure or len(self.samples) == LOOKS:
            return False
        self.sample(now)
        return True

    def result(self, now: RunTime, pids: Mapping[NodeId, tuple[int, ...]]) -> WorkersHung:
        """Return the hang with its cause, as far as the last sample tells. `pids`: by node."""
        return hung(self.hang, now, self._parts, pids, self.stacks)

    def report(self, hung: WorkersHung) -> str:
        """Return the stacks of the last sample as text for a person."""
        return report(self.stacks, hung.groups)
