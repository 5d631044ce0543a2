"""Examines workers that are silent for too long, and ends their attempt if they hang; names those that do not join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from raylaunch.cluster.capability import NEVER, DriverPart, DriverPort
from raylaunch.cluster.stack_probe import StackProbe
from raylaunch.core.failures.stacks import grouped, report
from raylaunch.core.machine.events_and_actions import Event, WorkersHung, WorkersStarted
from raylaunch.core.monitoring.hang_cause import describe_absent, hung
from raylaunch.core.monitoring.hang_detector import HangDetector, HangLimits, SuspectedHang
from raylaunch.core.monitoring.hang_policy import (
    LOOK_SECONDS,
    LOOKS,
    StackSample,
    activities,
    describe,
    max_silence,
    snooze_seconds,
)
from raylaunch.core.monitoring.rank_progress import RankProgress, WorldProgress
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Assignment, assign
from raylaunch.node.protocol.node_status import StacksDumped

_JOIN_SECONDS = 60.0
"""How long after the start of all workers those are named that others wait for. Later it is tried again."""
_EXAMINE_SECONDS = 0.25
"""How often the workers are examined at most: the heartbeats of a thousand nodes are examined together."""


@dataclass(slots=True, kw_only=True)
class _WatchedAttempt:
    """What is known of the attempt that is followed. Times are seconds since the run began."""

    world: WorldProgress
    detector: HangDetector
    parts: Sequence[Assignment] = ()
    pids: dict[NodeId, tuple[int, ...]] = field(default_factory=dict)
    examined_at: float = -NEVER
    examine_at: float = NEVER
    name_absent_at: float = NEVER
    probe: StackProbe | None = None
    """The stacks that are collected."""
    suspected: SuspectedHang | None = None
    """Why they are. None: to name those that have not joined."""
    samples: list[StackSample] = field(default_factory=list)
    """Of the suspected hang."""
    is_judged: bool = False
    """Whether the workers are to end if they still hang when all their threads are known, which the report has."""
    hung: bool = False
    """Whether its hang was reported: the attempt is about to end."""


class HangWatch(DriverPart):
    """The hangs of a run."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._limits = HangLimits.of(port.machine.job.hang_timeout)
        #: How often an attempt was ended at this place in the code, though it may only have been slow there.
        self._ended_at: Counter[str] = Counter()
        self._attempt = self._followed()

    def _followed(self) -> _WatchedAttempt:
        members, world = self._port.machine.world.members, self._port.progress()
        parts = assign(world.attempt, members) if members else ()
        return _WatchedAttempt(world=world, detector=HangDetector(world, self._limits), parts=parts)

    def launched(self, now: RunTime) -> None:
        """Follow another attempt; forget the one before."""
        del now
        self._attempt = self._followed()

    def started(self, word: WorkersStarted) -> None:
        """Learn that a node has started its workers."""
        attempt = self._attempt
        if word.attempt == attempt.world.attempt:
            attempt.pids[word.node] = word.pids
            attempt.world.workers_started(word.at)
            if not self._limits.are_none:
                attempt.name_absent_at = word.at + _JOIN_SECONDS

    def heartbeat(self, changed: Iterable[RankProgress], now: RunTime) -> None:
        """Examine the workers when one of them may hang."""
        attempt = self._attempt
        for worker in changed:
            attempt.detector.expect(worker)
        due = max(now, attempt.detector.due, attempt.examined_at + _EXAMINE_SECONDS)
        attempt.examine_at = min(attempt.examine_at, due)

    def stacks(self, answer: StacksDumped) -> None:
        """Take a node's stacks, if they are waited for."""
        if self._attempt.probe is not None:
            self._attempt.probe.answered(answer)

    @property
    def next_check(self) -> float:
        """When the workers may hang, or their stacks are there. Never while they are started or stopped."""
        attempt = self._attempt
        if not self._port.machine.phase.is_training:
            return NEVER
        if attempt.probe is None:
            return min(attempt.examine_at, attempt.name_absent_at)
        complete = attempt.probe.next_check
        if not complete or attempt.suspected is None or attempt.is_judged:
            return complete
        return attempt.probe.began_at + LOOK_SECONDS

    def due_events(self, now: RunTime) -> Iterator[Event]:
        """Yield a hang when all nodes have answered, or had the time to."""
        if now < self.next_check:
            return
        attempt = self._attempt
        if attempt.probe is not None and attempt.suspected is not None:
            yield from self._sampled(attempt, attempt.probe, now)
            return
        if attempt.probe is not None:
            self._name_absent(attempt, attempt.probe, now)
        if now >= attempt.examine_at:
            self._examine(attempt, now)
        if attempt.probe is None and now >= attempt.name_absent_at:
            self._look_for_absent(attempt, now)

    def _probe(self, attempt: _WatchedAttempt, now: RunTime) -> None:
        """Take a sample. The stacks of all threads only of workers that are to end, since this may end them."""
        ranks = [rank for part in attempt.parts for rank in part.ranks] if attempt.is_judged else []
        attempt.probe = StackProbe(attempt.parts, self._port.send)
        attempt.probe.sample(now, ranks)

    # A hang.

    def _examine(self, attempt: _WatchedAttempt, now: RunTime) -> None:
        attempt.examined_at = now
        if not attempt.hung and (hang := attempt.detector.check(now)) is not None:
            attempt.suspected, attempt.samples = hang, []
            attempt.is_judged = hang.is_sure
            self._probe(attempt, now)
        self._schedule(attempt, now)

    def _schedule(self, attempt: _WatchedAttempt, now: RunTime) -> None:
        next_check = None if attempt.hung else attempt.detector.next_check(now)
        attempt.examine_at = NEVER if next_check is None else next_check

    def _sampled(self, attempt: _WatchedAttempt, probe: StackProbe, now: RunTime) -> Iterator[Event]:
        """Take another sample if the hang is not sure; judge when there are enough, or it is over."""
        attempt.suspected = hang = attempt.detector.check(now)
        if hang is None:
            attempt.probe, attempt.is_judged = None, False
            self._schedule(attempt, now)
            return
        if attempt.is_judged:
            found = hung(hang, now, attempt.parts, attempt.pids, probe.stacks)
            attempt.probe, attempt.hung = None, True
            yield found
            # The next attempt is on its way by now.
            self._port.write_stacks(found.attempt, report(probe.stacks, found.groups))
            return
        attempt.samples.append(StackSample(at=probe.began_at, stacks=tuple(probe.stacks)))
        is_enough = len(attempt.samples) == LOOKS
        if is_enough and self._snoozes(attempt, hang, hung(hang, now, attempt.parts, attempt.pids, probe.stacks)):
            attempt.probe = attempt.suspected = None
            self._schedule(attempt, now)
            return
        attempt.is_judged = is_enough or hang.is_sure
        self._probe(attempt, now)

    def _snoozes(self, attempt: _WatchedAttempt, hang: SuspectedHang, found: WorkersHung) -> bool:
        """Give the workers more time if their stacks show that they may only be slow. Return whether they got it."""
        place = found.groups[0].place
        doing = activities(attempt.samples, (worker.rank for worker in hang.workers))
        most = max_silence(hang, doing, self._ended_at[place])
        more = snooze_seconds(hang, most)
        if not more:
            self._ended_at[place] += 1
            return False
        if not (hang.others_progress or hang.is_young):
            self._port.say(describe(hang, doing, found.groups, most))
        attempt.detector.snooze(hang, more)
        return True

    # A start that takes long.

    def _look_for_absent(self, attempt: _WatchedAttempt, now: RunTime) -> None:
        """Take a sample if workers have made no step since the start, and try again after twice the time."""
        attempt.name_absent_at = NEVER
        if any(not worker.marks for worker in attempt.world.alive()):
            attempt.name_absent_at = now + (now - attempt.world.running_since)
            self._probe(attempt, now)

    def _name_absent(self, attempt: _WatchedAttempt, probe: StackProbe, now: RunTime) -> None:
        """Tell a person, once in the attempt, which workers others wait for since the start."""
        attempt.probe = None
        alive = [*attempt.world.alive()]
        groups = grouped(probe.stacks, (worker.rank for worker in alive))
        marked = {worker.rank for worker in alive if worker.marks}
        if text := describe_absent(groups, marked, attempt.parts, now - attempt.world.running_since):
            attempt.name_absent_at = NEVER
            self._port.say(text)
