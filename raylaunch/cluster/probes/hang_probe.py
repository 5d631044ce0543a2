"""Probes of workers that may hang: the stacks of all, once or several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raylaunch.cluster.probes.stack_probe import StackProbe
from raylaunch.core.failures.stacks import report
from raylaunch.core.machine.events_and_actions import WorkersHung
from raylaunch.core.monitoring.hang_cause import hung
from raylaunch.core.monitoring.hang_detector import SuspectedHang
from raylaunch.core.monitoring.hang_policy import LOOK_SECONDS, LOOKS, StackSample
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.protocol.messages import Order


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
