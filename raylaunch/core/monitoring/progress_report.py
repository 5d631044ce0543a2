"""Reports of how far an attempt is: `Progressed` events, made of what heartbeats tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.monitoring.rank_progress import RATE_WINDOW, STALE, RankProgress, WorldProgress
from raylaunch.core.newtypes import NodeId, RunTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """How far the attempt is at a moment, for a person who watches. It decides nothing and is not recorded."""

    at: RunTime
    alive: int
    """The workers that were seen alive lately."""
    progress: Progressed | None
    """None: nothing was reported yet."""
    behind: int
    """How many steps the slowest worker is behind the fastest; 0: less than it makes in a second."""


class ProgressReporter:
    """Makes the reports of one attempt."""

    def __init__(self, world: WorldProgress, *, awaits_counts: bool = False, is_first: bool = True) -> None:
        """`awaits_counts`: the script numbers its steps in `should_checkpoint`. `is_first`: nothing was reported yet.

        Those numbers may differ from the optimizer's. So the first report waits until each worker has called it.
        """
        self._world = world
        self._awaits_counts = awaits_counts
        self._is_first = is_first
        #: What was reported of the nodes' memory.
        self._told: dict[NodeId, NodeMemory] = {}

    def report(self, at: RunTime) -> Progressed | None:
        """Return None until all workers have made a step, or one has for a while and others make none.

        In the first report `low` is the first step and `marked` the time when all had done it; in later reports both
        are of the last step. `at` is on the clock of the heartbeats' times, and it is the time of the event.
        """
        world = self._world
        if not world.started or (self._is_incomplete() and at - world.first_at < RATE_WINDOW):
            return None
        is_first, self._is_first = self._is_first, False
        memory = tuple(one for node, one in world.memory.items() if self._told.get(node) != one)
        self._told = dict(world.memory)
        return replace(self._progressed(at, is_first=is_first), memory=memory)

    def sample(self, at: RunTime) -> ProgressSample:
        """Return how far the attempt is, without making a report of it."""
        world = self._world
        alive = list(world.alive())
        is_reported = not self._is_first and world.started  # by a driver before this one, perhaps, which knew more
        progress = self._progressed(at, is_first=False) if is_reported else None
        places = [self._extrapolated(worker, worker.marks) for worker in alive if worker.marks]
        behind = int(max(places) - min(places)) if places else 0
        is_much = progress is not None and behind > max(1.0, progress.rate)
        return ProgressSample(at=at, alive=len(alive), progress=progress, behind=behind if is_much else 0)

    def _progressed(self, at: RunTime, *, is_first: bool) -> Progressed:
        world = self._world
        started = [worker for worker in world.workers.values() if worker.marks]
        going = [worker for worker in started if world.is_alive(worker)] or started
        slowest = min(going, key=lambda worker: (self._extrapolated(worker, worker.marks), worker.rank))
        high = max((worker.latest.step for worker in started if worker.latest.step is not None), default=None)
        return Progressed(
            at=at,
            attempt=world.attempt,
            marks=max(worker.marks for worker in started),
            low=_first_step(started) if is_first else self._lowest(going, high),
            high=high,
            marked=RunTime(max(worker.first_at if is_first else worker.marked_at for worker in started)),
            saved=_least(worker.latest.saved for worker in world.workers.values()),
            slowest=slowest.rank,
            rate=max(going, key=_place).rate(world.seen_at),
            committed=_least(worker.latest.committed for worker in world.workers.values()),
            copied=_least(world.copied.values()),
            slowest_save=self._slowest_save(),
            commit_rate=next((worker.latest.commit_rate for worker in going if worker.latest.commit_rate), None),
        )

    def _slowest_save(self) -> float | None:
        """How long it takes until all have saved: on the slowest worker and, with a durable folder, on disk."""
        saves = [each.latest.save_seconds for each in self._world.workers.values() if each.latest.save_seconds]
        on_disk = max((memory.disk_seconds for memory in self._world.memory.values()), default=0.0)
        return max(saves) + on_disk if saves else None

    def _is_incomplete(self) -> bool:
        """Whether the first report would leave workers out that are expected to make steps."""
        workers = self._world.workers
        if self._world.started < len(workers):
            return True
        uncounted = self._awaits_counts and self._is_first
        return uncounted and any(worker.latest.asked is None for worker in workers.values())

    def _lowest(self, going: list[RankProgress], high: int | None) -> int | None:
        if high is None:
            return None
        steps = [(worker, worker.latest.step) for worker in going]
        return min([high, *(int(self._extrapolated(worker, step)) for worker, step in steps if step is not None)])

    def _extrapolated(self, worker: RankProgress, steps: int) -> float:
        """The steps of a worker when the latest heartbeat of any node came: nodes report at different times."""
        seen_at = self._world.seen_at
        return steps + worker.rate(seen_at) * min(seen_at - worker.seen_at, STALE)


def _least(numbers: Iterable[int | None]) -> int | None:
    """Return the smallest number; None where one is missing."""
    known = [*numbers]
    found = [number for number in known if number is not None]
    return min(found) if found and len(found) == len(known) else None


def _place(worker: RankProgress) -> tuple[int, int]:
    return worker.marks, -worker.rank


def _first_step(started: list[RankProgress]) -> int | None:
    """The number of the first step. If no worker tells it, each mark counts as one step back from the latest."""
    told = [worker.latest.first_step for worker in started if worker.latest.first_step is not None]
    if told:
        return min(told)
    firsts = [worker.latest.step - (worker.marks - 1) for worker in started if worker.latest.step is not None]
    return max(0, *firsts) if firsts else None
