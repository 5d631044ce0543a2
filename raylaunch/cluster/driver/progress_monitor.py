"""Follows an attempt by its workers' heartbeats, and reports how far it is."""

from __future__ import annotations

from collections.abc import Iterator

from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.monitoring.checkpoint_step import checkpoints, propose_step, unsaved
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.monitoring.progress_report import ProgressReporter, ProgressSample
from raylaunch.core.monitoring.rank_progress import RankProgress, WorldProgress
from raylaunch.core.newtypes import RunTime

_REPORT_SECONDS = 60.0
"""How often progress is reported, which the journal keeps."""
_FIRST_REPORT_SECONDS = 2.0
_REPORTS_PER_AGE = 8
"""A young attempt reports so often in the time since its first report: a short run has a course too."""
_LOOK_SECONDS = 0.25
"""How often to look for the first steps at most: the heartbeats of a thousand nodes are examined together."""
_SAMPLE_SECONDS = 0.9
"""Heartbeats come once a second."""
_SAMPLED_PER_SECOND = 1000
"""Workers. To look at one takes some microseconds."""
_NEVER = float("inf")


class ProgressMonitor:
    """The progress of the present attempt. Times are seconds since the run began."""

    def __init__(self, *, calls_should_checkpoint: bool = False) -> None:
        """`calls_should_checkpoint`: an earlier driver has seen it."""
        #: Whether all workers of an earlier attempt have called `should_checkpoint`.
        self.calls_should_checkpoint = calls_should_checkpoint
        self.world = WorldProgress(0, ())
        self.begin(0, 0)

    def begin(self, attempt: int, size: int, *, has_progressed: bool = False) -> None:
        """Follow an attempt of this many workers; forget the one before.

        `has_progressed`: an earlier driver has reported of it.
        """
        workers = self.world.workers.values()
        self.calls_should_checkpoint |= bool(workers) and all(each.latest.asked is not None for each in workers)
        #: What is known of the workers of the attempt.
        self.world = WorldProgress(attempt, range(size))
        awaits_counts = self.calls_should_checkpoint
        self._reporter = ProgressReporter(self.world, awaits_counts=awaits_counts, is_first=not has_progressed)
        self._reported: Progressed | None = None
        self._report_at = _NEVER
        self._first_reported_at = _NEVER
        self._looked_at = self._sample_at = -_NEVER

    def step_ahead(self, now: RunTime) -> int:
        """Return a step a little ahead of all workers, at which they can save."""
        return propose_step(self.world, now)

    @property
    def can_save(self) -> bool:
        """Whether workers have called `should_checkpoint`, or commit `State`: else only a signal reaches the script."""
        return self.calls_should_checkpoint or any(asked is not None for asked, _ in checkpoints(self.world).values())

    def unsaved(self, step: int) -> str:
        """Return which workers did not save at the agreed step, for a person; `""`: all did, or none ever does."""
        return unsaved(step, checkpoints(self.world))

    def heartbeat(self, heartbeat: Heartbeat, now: RunTime) -> list[RankProgress]:
        """Take the heartbeats of a node's workers. Return those as `WorldProgress.update` does."""
        if self._reported is None:
            self._report_at = min(self._report_at, max(now, self._looked_at + _LOOK_SECONDS))
        return self.world.update(heartbeat, now)

    @property
    def next_check(self) -> float:
        """When `due_events` must be called next, in run time."""
        return self._report_at

    def due_events(self, now: RunTime) -> Iterator[Progressed]:
        """Yield a report if one is due."""
        if now >= self._report_at:
            self._looked_at, self._report_at = now, _NEVER
            yield from self.progress(now)

    def progress(self, now: RunTime) -> Iterator[Progressed]:
        """Yield how far the attempt is, unless that was reported before."""
        found = self._reporter.report(now)
        if found is not None and (self._reported is None or _news(found, self._reported)):
            self._reported = found
            self._first_reported_at = min(self._first_reported_at, now)
            yield found
        if self._reported is not None:
            age = now - self._first_reported_at
            self._report_at = now + min(_REPORT_SECONDS, max(_FIRST_REPORT_SECONDS, age / _REPORTS_PER_AGE))

    def sample(self, now: RunTime) -> ProgressSample | None:
        """Return how far the attempt is, for a person; None if that was asked a second ago, or longer in a big one."""
        if now < self._sample_at:
            return None
        self._sample_at = now + max(_SAMPLE_SECONDS, len(self.world.workers) / _SAMPLED_PER_SECOND)
        return self._reporter.sample(now)


def _news(found: Progressed, reported: Progressed) -> bool:
    return (found.marks, found.saved) != (reported.marks, reported.saved)
