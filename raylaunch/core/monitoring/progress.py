"""The progress of the present attempt: hands heartbeats to what observes, judges and reports them."""

from __future__ import annotations

from collections.abc import Iterable

from raylaunch.core.monitoring.hang_detector import HangDetector, HangLimits
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.monitoring.progress_report import ProgressReporter
from raylaunch.core.monitoring.rank_progress import WorldProgress


class ProgressTracker:
    """Follows one attempt after the other. All times are on one clock; only reports need it to be the run's."""

    def __init__(self, hang_timeout: float | None, auto: bool, *, calls_should_checkpoint: bool = False) -> None:
        """The first arguments are as for `HangLimits.of`."""
        self._limits = HangLimits.of(hang_timeout, auto=auto)
        #: Whether all workers of an earlier attempt have called `should_checkpoint`.
        self.calls_should_checkpoint = calls_should_checkpoint
        self.world = WorldProgress(0, ())
        self.begin(0, ())

    def begin(self, attempt: int, ranks: Iterable[int], *, has_progressed: bool = False) -> None:
        """Forget the attempt before, and follow this one. `has_progressed`: its first steps were reported before."""
        workers = self.world.workers.values()
        self.calls_should_checkpoint |= bool(workers) and all(each.latest.asked is not None for each in workers)
        self.world = WorldProgress(attempt, ranks)
        self.hangs = HangDetector(self.world, self._limits)
        awaits_counts = self.calls_should_checkpoint
        self.reporter = ProgressReporter(self.world, awaits_counts=awaits_counts, is_first=not has_progressed)

    def workers_started(self, at: float) -> None:
        """Note that a node has started its workers of this attempt."""
        self.world.workers_started(at)

    def update(self, heartbeat: Heartbeat, at: float) -> None:
        """Take over what a node said, at the time when it was received."""
        for worker in self.world.update(heartbeat, at):
            self.hangs.expect(worker)
