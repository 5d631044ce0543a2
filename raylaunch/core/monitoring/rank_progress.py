"""What heartbeats tell of the workers of one attempt: their steps, how fast they make them, and when they were seen.

A mark is a sign of life that a worker counts: an optimizer step or a heartbeat of the script.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import NodeId

WARM_UP = 3
"""Marks after which a worker has made its first steps, which compile and open connections."""
RATE_WINDOW = 10.0
"""Seconds over which rates are taken."""
STALE = 3.0
"""Seconds. A worker that was last seen so long before the others has ended, or its node is being dealt with."""
_MIN_POINTS = 2
_BURST_SECONDS = 0.05
"""Heartbeats that come closer together were held up on their way, as while there was no driver: no rate follows."""


class StepWindow:
    """The steps of one worker during the last `RATE_WINDOW` seconds, and the rates that follow from them."""

    def __init__(self) -> None:
        #: (time of the mark, marks, count), where marks or count changed. The first may lie before the window.
        self._points: list[tuple[float, int, int]] = []

    def add(self, marked_at: float, marks: int, count: int) -> None:
        """Note a state. `count` is the number of the latest step as `RankProgress.count` defines it."""
        if not self._points or self._points[-1][1:] != (marks, count):
            self._points.append((marked_at, marks, count))
        while len(self._points) > _MIN_POINTS and self._points[1][0] <= marked_at - RATE_WINDOW:
            del self._points[0]

    def count_from(self, marks: int, count: int) -> None:
        """Take each earlier mark for one count less than this one: steps had other numbers until now."""
        self._points = [(at, before, count - (marks - before)) for at, before, _ in self._points]

    def marks_per_second(self, silence: float) -> float:
        """The mean rate of marks; 0 if the silence since the last mark shows that the worker stands still."""
        if len(self._points) < _MIN_POINTS:
            return 0.0
        (since, before, _), (until, marks, _) = self._points[0], self._points[-1]
        if until <= since or marks <= before:
            return 0.0
        rate = (marks - before) / (until - since)
        return 0.0 if silence > max(RATE_WINDOW, 2 / rate) else rate

    def max_counts_per_second(self) -> float | None:
        """The highest rate between two heartbeats of the window; None if there was only one, or all came at once."""
        pairs = [*itertools.pairwise(self._points), (self._points[0], self._points[-1])] if self._points else []
        times = [(now[0] - then[0], now[2] - then[2]) for then, now in pairs]
        return max((counts / seconds for seconds, counts in times if seconds >= _BURST_SECONDS), default=None)


class RankProgress:
    """One worker of the attempt, as the heartbeats of its node show it. All times are on the reader's clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.latest = WorkerProgress(rank=rank, marks=0, age=0.0)
        self.first_seen_at = math.inf
        self.seen_at = -math.inf
        #: When it made its first and its latest mark; meaningless without marks.
        self.first_at = 0.0
        self.marked_at = 0.0
        #: The longest time between two marks, without the times in which silence was expected.
        self.longest_pause = 0.0
        #: Silence that is accepted until the next mark, in seconds: its reason was looked into.
        self.accepted_silence = 0.0
        self.window = StepWindow()

    def update(self, new: WorkerProgress, at: float, busy_until: float) -> None:
        """Take over what a heartbeat received at this time says. Silence before `busy_until` was expected."""
        marked_at = at - new.age
        if new.marks > self.marks:
            if self.marks:
                self.longest_pause = max(self.longest_pause, marked_at - max(self.marked_at, busy_until))
            else:
                self.first_at = self._first_mark_at(new, at)
            self.marked_at, self.accepted_silence = marked_at, 0.0
        elif self.marks:
            self.marked_at = marked_at
        before, self.latest = self.latest, new
        if before.asked is None and new.asked is not None:  # a script that was restarted goes on at a large number
            self.window.count_from(new.marks, new.asked)
        self.seen_at = at
        self.first_seen_at = min(self.first_seen_at, at)
        if new.marks:
            self.window.add(self.marked_at, new.marks, self.count)

    def _first_mark_at(self, new: WorkerProgress, at: float) -> float:
        """If only the last mark is known, assume that marks came evenly since the worker was last seen."""
        if new.first_age is not None:
            return at - new.first_age
        marked_at = at - new.age
        return marked_at - (new.marks - 1) / new.marks * max(0.0, marked_at - max(self.seen_at, marked_at - 1.0))

    @property
    def marks(self) -> int:
        """The number of marks of this attempt."""
        return self.latest.marks

    @property
    def count(self) -> int:
        """The latest step as `should_checkpoint` counts: the one it was called for, else the one that was done."""
        asked = self.latest.asked
        return asked if asked is not None else self.latest.step or 0

    def rate(self, now: float) -> float:
        """Marks per second; 0 if the worker stands still."""
        return self.window.marks_per_second(now - self.marked_at)

    def max_counts_per_second(self) -> float:
        """The highest rate of late. A worker seen once is taken to have made all its steps in one second or more.

        A driver that takes over sees workers for the first time that have trained for long.
        """
        highest = self.window.max_counts_per_second()
        return self.marks / max(1.0, self.seen_at - self.first_at) if highest is None else highest


class WorldProgress:
    """All workers of one attempt. Times are on the clock of whoever passes `at`."""

    def __init__(self, attempt: int, ranks: Iterable[int]) -> None:
        self.attempt = attempt
        self.workers = {rank: RankProgress(rank) for rank in ranks}
        #: What nodes hold for the script, and which commits they have copied; see `Heartbeat`.
        self.memory: dict[NodeId, NodeMemory] = {}
        self.copied: dict[NodeId, int | None] = {}
        #: When the latest heartbeat of any node came.
        self.seen_at = -math.inf
        #: When the last of the nodes started its workers, as far as that is known.
        self.running_since = -math.inf
        #: No worker's silence counts before this time, because some worker was in a section without signs of life.
        self.busy_until = -math.inf
        #: The number of workers with a mark, and when the first of them made it.
        self.started = 0
        self.first_at = math.inf
        self._busy: dict[int, RankProgress] = {}
        self._stopped: dict[int, RankProgress] = {}

    def workers_started(self, at: float) -> None:
        """Note that a node has started its workers. Workers of other nodes may have waited for them until now."""
        self.running_since = max(self.running_since, at)

    def update(self, heartbeat: Heartbeat, at: float) -> list[RankProgress]:
        """Take over a heartbeat received at this time.

        Return the workers that were absent until now, that have just made their first mark or warmed up, or that were
        stopped: their silence is measured differently from now on. Heartbeats of other attempts, or overtaken by later
        ones, change nothing.
        """
        if heartbeat.attempt != self.attempt:
            return []
        was_busy = self._is_busy()
        changed = [worker for new in heartbeat.marks if (worker := self._update_worker(new, at)) is not None]
        if (memory := heartbeat.memory) is not None:
            self.memory[memory.node] = memory
            self.copied[memory.node] = heartbeat.copied
        self.seen_at = max(self.seen_at, at)
        if was_busy or self._is_busy():
            self.busy_until = self.seen_at
        return changed

    def _update_worker(self, new: WorkerProgress, at: float) -> RankProgress | None:
        worker = self.workers.get(new.rank)
        if worker is None or at < worker.seen_at or new.marks < worker.marks:
            return None
        marks, absent = worker.marks, at - worker.seen_at > STALE
        was_stopped = worker.latest.stopped
        worker.update(new, at, self.busy_until)
        for flag, workers in ((new.busy, self._busy), (new.stopped, self._stopped)):
            if flag:
                workers[new.rank] = worker
            elif workers:
                workers.pop(new.rank, None)
        if new.marks and not marks:
            self.started += 1
            self.first_at = min(self.first_at, worker.first_at)
        is_further = any(marks < limit <= new.marks for limit in (1, WARM_UP))
        return worker if absent or is_further or (new.stopped and not was_stopped) else None

    def _is_busy(self) -> bool:
        """Whether silence is expected. A process that is stopped does nothing that others would have to wait for."""
        return any(map(self.is_alive, self._busy.values())) and not any(map(self.is_alive, self._stopped.values()))

    def is_alive(self, worker: RankProgress) -> bool:
        """Whether its node's latest heartbeat still shows the worker, compared to other nodes' heartbeats."""
        return self.seen_at - worker.seen_at <= STALE

    def alive(self) -> Iterator[RankProgress]:
        """All workers that are alive, by rank."""
        return filter(self.is_alive, self.workers.values())

    def silent_since(self, worker: RankProgress) -> float:
        """Since when a worker is silent. Without a mark: since the first mark of any worker, or since all are there."""
        unmarked = self.first_at if self.started else max(worker.first_seen_at, self.running_since)
        return max(worker.marked_at if worker.marks else unmarked, self.busy_until)

    def silence(self, worker: RankProgress) -> float:
        """Seconds for which a worker was silent when it was last seen. Delayed heartbeats do not count."""
        return max(0.0, worker.seen_at - self.silent_since(worker))
