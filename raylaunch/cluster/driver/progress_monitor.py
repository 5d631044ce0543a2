"""Follows an attempt by its workers' heartbeats: reports how far it is, and finds out whether it hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.probes.hang_probe import HangProbe
from raylaunch.cluster.probes.stack_probe import StackProbe
from raylaunch.core.failures.stacks import grouped
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Event, Progressed, WorkersHung, WorkersStarted
from raylaunch.core.monitoring.checkpoint_step import Checkpoints, checkpoints, propose_step, unsaved
from raylaunch.core.monitoring.hang_cause import describe_absent
from raylaunch.core.monitoring.hang_policy import activities, describe, max_silence, snooze_seconds
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.monitoring.progress import ProgressTracker
from raylaunch.core.monitoring.progress_report import ProgressSample
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.protocol.messages import StacksDumped

_REPORT_SECONDS = 60.0
"""How often progress is reported, which the journal keeps."""
_FIRST_REPORT_SECONDS = 2.0
_REPORTS_PER_AGE = 8
"""A young attempt reports so often in the time since its first report: a short run has a course too."""
_JOIN_SECONDS = 60.0
"""How long after the start of all workers those are named that others wait for. Later it is tried again."""
_EXAMINE_SECONDS = 0.25
"""How often the workers are examined at most: the heartbeats of a thousand nodes are examined together."""
_SAMPLE_SECONDS = 0.9
"""Heartbeats come once a second."""
_SAMPLED_PER_SECOND = 1000
"""Workers. To look at one takes some microseconds."""
_NEVER = float("inf")


class ProgressMonitor:
    """Progress and hangs of the present attempt. Times are seconds since the run began."""

    def __init__(
        self,
        progress: ProgressTracker,
        fleet: Fleet,
        write_stacks: Callable[[int, str], None],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`write_stacks` keeps the stacks of a hung attempt. `say` tells a person of a long stall that is no hang."""
        self._progress = progress
        self._fleet = fleet
        self._write_stacks = write_stacks
        self._say = say
        #: How often an attempt was ended at this place in the code, though it may only have been slow there.
        self._ended_at: Counter[str] = Counter()
        self._parts: Sequence[Assignment] = ()
        self._attempt = 0
        self._begin()

    def begin(self, parts: Sequence[Assignment], *, has_progressed: bool = False) -> None:
        """Begin with the attempt that these assignments are of; forget the one before.

        `has_progressed`: an earlier driver has reported of it.
        """
        self._parts = parts
        self._attempt = parts[0].attempt
        self._progress.begin(self._attempt, range(parts[0].world_size), has_progressed=has_progressed)
        self._begin()

    def _begin(self) -> None:
        self._pids: dict[NodeId, tuple[int, ...]] = {}
        self._reported: Progressed | None = None
        self._report_at = _NEVER
        self._first_reported_at = _NEVER
        self._examined_at = -_NEVER
        self._examine_at = _NEVER
        self._name_absent_at = _NEVER
        self._probe: StackProbe | None = None
        self._hung = False
        self._sample_at = -_NEVER

    @property
    def parts(self) -> Sequence[Assignment]:
        """The assignments of the attempt that is followed; empty before the first."""
        return self._parts

    def step_ahead(self, now: RunTime) -> int:
        """Return a step a little ahead of all workers, at which they can save."""
        return propose_step(self._progress.world, now)

    @property
    def calls_should_checkpoint(self) -> bool:
        """Whether all workers of an earlier attempt have called `should_checkpoint`."""
        return self._progress.calls_should_checkpoint

    @property
    def can_save(self) -> bool:
        """Whether workers have called `should_checkpoint`, or commit `State`: else only a signal reaches the script."""
        return self.calls_should_checkpoint or any(asked is not None for asked, _ in self._checkpoints().values())

    def _checkpoints(self) -> Checkpoints:
        return checkpoints(self._progress.world)

    def unsaved(self, step: int) -> str:
        """Return which workers did not save at the agreed step, for a person; `""`: all did, or none ever does."""
        return unsaved(step, self._checkpoints())

    def started(self, word: WorkersStarted) -> None:
        """A node started its workers."""
        if word.attempt == self._attempt:
            self._pids[word.node] = word.pids
            self._progress.workers_started(word.at)
            if self._progress.hangs.is_on:
                self._name_absent_at = word.at + _JOIN_SECONDS

    def heartbeat(self, heartbeat: Heartbeat, now: RunTime) -> None:
        """Take the heartbeats of a node's workers."""
        self._progress.update(heartbeat, now)
        # To examine all workers takes time, so do it for the first steps, which are reported, and when one may hang.
        due = now if self._reported is None else self._progress.hangs.due
        self._examine_at = min(self._examine_at, max(now, due, self._examined_at + _EXAMINE_SECONDS))

    def stacks(self, word: StacksDumped) -> None:
        """Take a node's stacks, if a probe is waiting for them."""
        if self._probe is not None:
            self._probe.answered(word)

    @property
    def next_check(self) -> float:
        """When `due_events` must be called next, in run time."""
        if self._probe is not None:
            return self._probe.next_check
        return min(self._examine_at, self._report_at, self._name_absent_at)

    def due_events(self, now: RunTime) -> Iterator[Event]:
        """Yield the events that are due. A suspected hang is reported when all nodes have answered its probe."""
        if now < self.next_check:
            return
        if isinstance(self._probe, HangProbe):
            yield from self._continue_probe(self._probe, now)
            return
        if self._probe is not None:
            self._name_absent(self._probe, now)
        if self._reported is None or now >= self._report_at:
            yield from self.progress(now)
        if now >= self._examine_at:
            self._examine(now)
        if self._probe is None and now >= self._name_absent_at:
            self._look_for_absent(now)

    def progress(self, now: RunTime) -> Iterator[Progressed]:
        """Yield how far the attempt is, unless that was reported before."""
        found = self._progress.reporter.report(now)
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
        self._sample_at = now + max(_SAMPLE_SECONDS, len(self._progress.world.workers) / _SAMPLED_PER_SECOND)
        return self._progress.reporter.sample(now)

    def _examine(self, now: RunTime) -> None:
        self._examined_at = now
        hang = None if self._hung else self._progress.hangs.check(now)
        if hang is not None:
            self._probe = HangProbe(hang, self._parts, self._fleet.send)
            self._probe.sample(now)
        self._schedule(now)

    def _look_for_absent(self, now: RunTime) -> None:
        """Take a sample if workers have made no step since the start, and try again after twice the time."""
        world = self._progress.world
        self._name_absent_at = _NEVER
        if any(not worker.marks for worker in world.alive()):
            self._name_absent_at = now + (now - world.running_since)
            self._probe = StackProbe(self._parts, self._fleet.send)
            self._probe.sample(now)

    def _name_absent(self, probe: StackProbe, now: RunTime) -> None:
        """Tell a person, once in the attempt, which workers others wait for since the start."""
        self._probe = None
        world = self._progress.world
        alive = [*world.alive()]
        groups = grouped(probe.stacks, (worker.rank for worker in alive))
        marked = {worker.rank for worker in alive if worker.marks}
        if text := describe_absent(groups, marked, self._parts, now - world.running_since):
            self._name_absent_at = _NEVER
            self._say(text)

    def _schedule(self, now: RunTime) -> None:
        next_check = None if self._hung else self._progress.hangs.next_check(now)
        self._examine_at = _NEVER if next_check is None else next_check

    def _continue_probe(self, probe: HangProbe, now: RunTime) -> Iterator[Event]:
        hang = self._progress.hangs.check(now)
        if hang is not None and probe.sampled(hang, now):
            return
        self._probe = None
        if hang is not None:
            hung = probe.result(now, self._pids)
            if hang.is_sure or not self._snoozes(probe, hung):
                self._hung = True
                yield hung
                self._write_stacks(hung.attempt, probe.report(hung))  # the next attempt is on its way by now
                return
        self._schedule(now)

    def _snoozes(self, probe: HangProbe, hung: WorkersHung) -> bool:
        """Give the workers more time if their stacks show that they may only be slow. Return whether they got it."""
        hang, place = probe.hang, hung.groups[0].place
        doing = activities(probe.samples, (worker.rank for worker in hang.workers))
        most = max_silence(hang, doing, self._ended_at[place])
        more = snooze_seconds(hang, most)
        if not more:
            self._ended_at[place] += 1
            return False
        if not (hang.others_progress or hang.is_young):
            self._say(describe(hang, doing, hung.groups, most))
        self._progress.hangs.snooze(hang, more)
        return True


def _news(found: Progressed, reported: Progressed) -> bool:
    return (found.marks, found.saved) != (reported.marks, reported.saved)


def tracker_of(job: Job, *, calls_should_checkpoint: bool = False) -> ProgressTracker:
    """Return what follows the progress of a job's workers. `calls_should_checkpoint`: an earlier driver has seen it."""
    seconds = None if isinstance(job.hang_timeout, str) else float(job.hang_timeout)
    return ProgressTracker(seconds, job.hang_timeout == "auto", calls_should_checkpoint=calls_should_checkpoint)
