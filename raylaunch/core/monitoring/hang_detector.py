"""Which workers are silent for too long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raylaunch.core.monitoring.rank_progress import STALE, WARM_UP, RankProgress, WorldProgress

AUTO_FLOOR = 300.0
AUTO_FACTOR = 2.0
"""With `hang_timeout: auto` the limit of a worker is its longest pause times the factor, and the floor at least."""
FIRST_FLOOR = 600.0
"""With `hang_timeout: auto`, the least limit, in seconds, of a worker that has not warmed up."""
_CHECK_SECONDS = 0.3
"""Seconds between two checks while a worker is over its limit: the next heartbeat tells more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long a worker may be silent.

    A number of seconds is obeyed, from the start of the attempt. With `auto`, a silence over the limit is only a reason
    to look at what the workers do.
    """

    timeout: float
    auto: bool

    @classmethod
    def of(cls, setting: float | str) -> HangLimits:
        """`setting`: `hang_timeout`. With `off` there is no limit."""
        if isinstance(setting, str):
            return cls(timeout=AUTO_FLOOR if setting == "auto" else math.inf, auto=setting == "auto")
        return cls(timeout=float(setting), auto=False)

    @property
    def are_none(self) -> bool:
        """Whether no worker is ever suspected."""
        return self.timeout == math.inf

    def limit(self, worker: RankProgress) -> float:
        """Seconds of silence after which a worker is suspected to hang."""
        if not self.auto:
            return self.timeout
        return max(self.timeout, FIRST_FLOOR if worker.marks < WARM_UP else AUTO_FACTOR * worker.longest_pause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A worker at the time when the hang was found."""

    rank: int
    marks: int
    since: float
    """When it gave its last sign of life; later, if silence was expected then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedHang:
    """A worker was silent for too long."""

    seconds: float
    """How long it was silent."""
    ranks: tuple[int, ...]
    """The worker, and all that were silent nearly as long: workers that wait for the culprit fall silent too."""
    workers: tuple[Stall, ...]
    """All workers that are alive."""
    is_sure: bool = True
    """The silence is longer than the number of seconds that the user gave. Otherwise see what the workers do first."""
    is_young: bool = False
    """No worker has warmed up."""
    others_ended: bool = False
    """Some workers of the attempt have ended."""
    quiet: float = 0.0
    """Seconds since any worker made a mark."""
    limit: float = 0.0
    """The limit of the worker that may be silent longest, in seconds."""

    @property
    def others_progress(self) -> bool:
        """Whether other workers make steps meanwhile."""
        return len(self.ranks) < len(self.workers)


class HangDetector:
    """Judges the silence of the workers of one attempt, by heartbeats and never by the delay of heartbeats."""

    def __init__(self, world: WorldProgress, limits: HangLimits) -> None:
        self._world = world
        self._limits = limits
        #: No worker is over its limit before this time; infinity: none is there, or there is no limit.
        self.due = math.inf

    def expect(self, worker: RankProgress) -> None:
        """Take a worker into account that `WorldProgress.update` returned."""
        self.due = min(self.due, self._due(worker))

    def check(self, now: float) -> SuspectedHang | None:
        """Return the hang that fresh heartbeats show, until it is over or snoozed."""
        world = self._world
        if now > world.seen_at + STALE:
            return None
        self._reschedule()
        alive = [*world.alive()]
        over = [worker for worker in alive if world.silence(worker) > self._allowed(worker)]
        if not over:
            return None
        warm = [worker for worker in alive if worker.marks >= WARM_UP]
        first = max(over, key=world.silence)
        nearly = min(map(self._limits.limit, over)) / 2
        return SuspectedHang(
            seconds=world.silence(first),
            ranks=tuple(worker.rank for worker in alive if world.silence(worker) > nearly),
            workers=tuple(
                Stall(rank=worker.rank, marks=worker.marks, since=worker.seen_at - world.silence(worker))
                for worker in alive
            ),
            is_sure=not self._limits.auto,
            is_young=not warm,
            others_ended=len(alive) < len(world.workers),
            quiet=min(map(world.silence, warm or alive)),
            limit=max(map(self._limits.limit, warm or alive)),
        )

    def snooze(self, hang: SuspectedHang, seconds: float) -> None:
        """Give the suspects `seconds` more, each until its next mark, since they do not hang."""
        for rank in hang.ranks:
            worker = self._world.workers[rank]
            worker.accepted_silence = self._world.silence(worker) + seconds
        self._reschedule()

    def next_check(self, now: float) -> float | None:
        """When to call `check` again, besides after each heartbeat; None if no worker can hang yet."""
        return max(self.due, now + _CHECK_SECONDS) if self.due < math.inf else None

    def _reschedule(self) -> None:
        self.due = min(map(self._due, self._world.alive()), default=math.inf)

    def _due(self, worker: RankProgress) -> float:
        """When the worker will be over its limit, should nothing more be seen of it."""
        return self._world.silent_since(worker) + self._allowed(worker)

    def _allowed(self, worker: RankProgress) -> float:
        """With a number, a worker without steps may be silent if others have made some, unless it is stopped.

        The script may have an optimizer on some ranks only. With `auto`, stacks tell whether such a worker hangs.
        """
        if not (self._limits.auto or worker.marks or worker.latest.stopped) and self._world.started:
            return math.inf
        return max(self._limits.limit(worker), worker.accepted_silence)
