"""How far each worker is, and which of them has fallen silent: from marks that nodes report each second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from raylaunch.core.events import Progressed
from raylaunch.core.pulse import Mark, Pulse
from raylaunch.core.unsaved import unsaved

WARM_UP = 3
"""Marks after which a worker has made its first steps, which compile, and open connections."""
AUTO_FLOOR = 300.0
AUTO_FACTOR = 2.0
"""With `auto`, a worker that is silent for so many seconds, and times its longest pause, is looked at."""
FIRST_FLOOR = 600.0
"""Seconds after which one is looked at that has not made its first steps."""

_WINDOW = 10.0
"""Seconds that the rate is taken over."""
_STALE = 3.0
"""Seconds: a worker that was last seen as long before others has ended, or is its node's affair."""
_LOOK_AGAIN = 0.3
"""Seconds between two looks at somebody who may hang by now: the next pulse tells."""
_ORDER_SECONDS = 0.1
_SPARE_STEPS = 2
"""How far ahead of the fastest worker a step is proposed for all to save at: what a message takes, and a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How a worker stood when the hang was found."""

    rank: int
    marks: int
    since: float
    """When it last gave a sign of life, as far as that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A worker was silent for too long."""

    seconds: float
    """How long."""
    ranks: tuple[int, ...]
    """It, and all that have been silent nearly as long: whoever waits for the one at fault falls silent too."""
    workers: tuple[Silence, ...]
    """All that are alive."""
    is_sure: bool = True
    """It was longer than the seconds that were given; else it is to be seen what the workers do."""
    is_young: bool = False
    """Nobody has made his first steps."""
    quiet: float = 0.0
    """Seconds since anybody made a step."""
    limit: float = 0.0
    """Seconds after which that is to be looked into."""

    @property
    def goes_on(self) -> bool:
        """Whether others make steps meanwhile."""
        return len(self.ranks) < len(self.workers)


@dataclass(slots=True)
class _Worker:
    rank: int
    marks: int = 0
    marked_at: float = 0.0
    first_at: float = 0.0
    seen_at: float = -math.inf
    pause: float = 0.0
    first_step: int | None = None
    step: int | None = None
    asked: int | None = None
    saved: int | None = None
    busy: bool = False
    #: (marked_at, marks, count) of the last while, where it changed.
    history: list[tuple[float, int, int]] = field(default_factory=list)
    #: When it was first seen.
    born_at: float = math.inf
    #: Seconds of silence that are borne, since it was seen what all do; until its next mark.
    borne: float = 0.0

    def note(self, mark: Mark, at: float, quiet: float) -> None:
        """What a pulse that came at this time says. `quiet`: until then its silence meant nothing."""
        marked_at = at - mark.age
        if mark.marks > self.marks:
            if self.marks:
                self.pause = max(self.pause, marked_at - max(self.marked_at, quiet))
            else:
                self.first_at = self._first(mark, at, marked_at)
            self.marks, self.marked_at, self.borne = mark.marks, marked_at, 0.0
        elif self.marks:
            self.marked_at = marked_at
        self.seen_at, self.busy = at, mark.busy
        self.born_at = min(self.born_at, at)
        self.step, self.asked, self.saved = mark.step, mark.asked, mark.saved
        self.first_step = mark.first_step
        if self.marks and (not self.history or self.history[-1][1:] != (self.marks, self.count)):
            self.history.append((self.marked_at, self.marks, self.count))
        while len(self.history) > 2 and self.history[1][0] <= self.marked_at - _WINDOW:  # noqa: PLR2004
            del self.history[0]

    def _first(self, mark: Mark, at: float, marked_at: float) -> float:
        """Where only the last mark is known: as if they had come evenly since the worker was last seen."""
        if mark.first_age is not None:
            return at - mark.first_age
        return marked_at - (mark.marks - 1) / mark.marks * max(0.0, marked_at - max(self.seen_at, marked_at - 1.0))

    @property
    def count(self) -> int:
        """The step that counts where all are to stop at one: what it asked about, else what it did."""
        return self.asked if self.asked is not None else self.step or 0

    def rate(self, now: float) -> float:
        """Steps per second; 0 where it stands still."""
        if len(self.history) < 2:  # noqa: PLR2004
            return 0.0
        (since, before, _), (until, marks, _) = self.history[0], self.history[-1]
        if until <= since or marks <= before:
            return 0.0
        pace = (marks - before) / (until - since)
        return 0.0 if now - self.marked_at > max(_WINDOW, 2 / pace) else pace

    def counts_a_second(self) -> float:
        """As fast as it was at any time of the last while; of a worker seen once, all it did within one second."""
        if len(self.history) < 2:  # noqa: PLR2004
            return float(self.marks)
        pairs = [*itertools.pairwise(self.history), (self.history[0], self.history[-1])]
        return max((now[2] - then[2]) / max(now[0] - then[0], 0.001) for then, now in pairs)


class Progress:
    """The present attempt's. All times are on one clock, whichever that is; only `so_far` names it: the run's.

    A worker's silence is judged by what pulses showed, never by their own delay. A number of seconds is obeyed, but
    not in its first steps. There, and with `auto`, a long silence is only a reason to look at what the workers do;
    `bear` says that this was no hang.
    """

    def __init__(self, hang_timeout: float | None, auto: bool) -> None:
        """`auto`: by each worker's own pauses, `hang_timeout` at least. Neither: never."""
        self._timeout = (AUTO_FLOOR if auto else math.inf) if hang_timeout is None else hang_timeout
        self._auto = auto
        #: Whether all workers of an attempt before have asked `should_checkpoint`.
        self._asks = False
        self._workers: dict[int, _Worker] = {}
        self.begin(0, ())

    def begin(self, attempt: int, ranks: Iterable[int]) -> None:
        """Another attempt: nothing of the one before is left."""
        self._attempt = attempt
        self._asks |= bool(self._workers) and all(worker.asked is not None for worker in self._workers.values())
        self._workers = {rank: _Worker(rank) for rank in ranks}
        self._seen_at = -math.inf
        #: Until then nobody's silence counts, since somebody was busy.
        self._quiet = -math.inf
        self._told = False
        #: Those of which the last word is that they are busy.
        self._busy: dict[int, _Worker] = {}
        #: How many have made a mark, and when the first did.
        self._begun = 0
        self._first_at = math.inf
        #: Nobody hangs before this, whatever pulses say; infinity: nobody is there, or can.
        self.due = math.inf

    def take(self, pulse: Pulse, at: float) -> None:
        """What a node said, at the time when it was heard."""
        if pulse.attempt != self._attempt:
            return
        was_busy = self._is_busy()
        for mark in pulse.marks:
            worker = self._workers.get(mark.rank)
            if worker is not None and at >= worker.seen_at and mark.marks >= worker.marks:
                self._note(worker, mark, at)
        self._seen_at = max(self._seen_at, at)
        if was_busy or self._is_busy():
            self._quiet = self._seen_at

    def _note(self, worker: _Worker, mark: Mark, at: float) -> None:
        before, absent = worker.marks, at - worker.seen_at > _STALE
        worker.note(mark, at, self._quiet)
        if mark.busy:
            self._busy[mark.rank] = worker
        elif self._busy:
            self._busy.pop(mark.rank, None)
        if mark.marks and not before:
            self._begun += 1
            self._first_at = min(self._first_at, worker.first_at)
        if absent or before < WARM_UP <= mark.marks:
            self.due = min(self.due, self._due(worker))

    def hang(self, now: float) -> Hang | None:
        """Whether somebody was silent for too long, by fresh pulses. Found again until that is borne, or over."""
        if now > self._seen_at + _STALE:
            return None
        live = [worker for worker in self._workers.values() if self._is_live(worker)]
        self.due = min(map(self._due, live), default=math.inf)
        over = [worker for worker in live if self._silence(worker) > max(self._limit(worker), worker.borne)]
        if not over:
            return None
        warm = [worker for worker in live if worker.marks >= WARM_UP]
        first = max([worker for worker in over if self._is_sure(worker)] or over, key=self._silence)
        nearly = min(map(self._limit, over)) / 2
        return Hang(
            seconds=self._silence(first),
            ranks=tuple(worker.rank for worker in live if self._silence(worker) > nearly),
            workers=tuple(
                Silence(rank=worker.rank, marks=worker.marks, since=worker.seen_at - self._silence(worker))
                for worker in live
            ),
            is_sure=self._is_sure(first),
            is_young=not warm,
            quiet=min(map(self._silence, warm or live)),
            limit=max(map(self._limit, warm or live)),
        )

    def bear(self, hang: Hang, seconds: float) -> None:
        """It was seen what they do: for so long nobody looks again, but at those who made marks meanwhile."""
        for rank in hang.ranks:
            worker = self._workers[rank]
            worker.borne = self._silence(worker) + seconds
        self.due = min(map(self._due, filter(self._is_live, self._workers.values())), default=math.inf)

    def next_look(self, now: float) -> float | None:
        """When `hang` is to be asked again, besides after each pulse; None where nobody can hang yet."""
        return max(self.due, now + _LOOK_AGAIN) if self.due < math.inf else None

    def ask_at(self, now: float) -> int:
        """A step that no worker has come to yet when it hears of it, and all soon will."""
        ahead = (
            worker.count + worker.counts_a_second() * (max(0.0, now - worker.seen_at) + _ORDER_SECONDS)
            for worker in self._workers.values()
            if self._is_live(worker)
        )
        return math.ceil(max(ahead, default=0.0)) + _SPARE_STEPS

    def unsaved(self, step: int) -> str:
        """Who had not saved at a step at which all were to, in words for a person."""
        return unsaved(step, {rank: (worker.asked, worker.saved) for rank, worker in self._workers.items()})

    def so_far(self, at: float) -> Progressed | None:
        """None until all workers have done a step, or one has for a while and others do none.

        Of the first word `low` is the first step and `marked` when all had done it; later ones are of the last step.
        """
        waits = self._begun < len(self._workers)
        # Scripts that count their steps by `should_checkpoint` may have another count than their optimizers.
        waits |= self._asks and not self._told and any(worker.asked is None for worker in self._workers.values())
        if not self._begun or (waits and at - self._first_at < _WINDOW):
            return None
        begun = [worker for worker in self._workers.values() if worker.marks]
        furthest = max(begun, key=_place)
        going = [worker for worker in begun if self._is_live(worker)] or begun
        slowest = min(going, key=lambda worker: (self._aligned(worker, worker.marks), worker.rank))
        high = max((worker.step for worker in begun if worker.step is not None), default=None)
        told, self._told = self._told, True
        return Progressed(
            at=at,
            attempt=self._attempt,
            marks=furthest.marks,
            low=self._low(going, high) if told else _first_step(begun),
            high=high,
            marked=max(worker.marked_at if told else worker.first_at for worker in begun),
            saved=min((worker.saved for worker in begun if worker.saved is not None), default=None),
            slowest=slowest.rank,
            rate=max(going, key=_place).rate(self._seen_at),
        )

    def _low(self, going: list[_Worker], high: int | None) -> int | None:
        known = [self._aligned(worker, worker.step) for worker in going if worker.step is not None]
        return min([high, *map(int, known)]) if high is not None else None

    def _aligned(self, worker: _Worker, steps: int) -> float:
        """Where the worker was when the latest pulse came: nodes are not heard at the same moment."""
        return steps + worker.rate(self._seen_at) * min(self._seen_at - worker.seen_at, _STALE)

    def _is_live(self, worker: _Worker) -> bool:
        return self._seen_at - worker.seen_at <= _STALE

    def _is_busy(self) -> bool:
        return any(map(self._is_live, self._busy.values()))

    def _silence(self, worker: _Worker) -> float:
        """Known of the worker when it was last seen."""
        return max(0.0, worker.seen_at - self._began(worker))

    def _began(self, worker: _Worker) -> float:
        """Since when it is silent; before its first mark, since anybody's first, or since it is there."""
        first_at = self._first_at if self._begun else worker.born_at
        return max(worker.marked_at if worker.marks else first_at, self._quiet)

    def _due(self, worker: _Worker) -> float:
        """When it will have been silent for too long, should nothing more be seen of it."""
        return self._began(worker) + max(self._limit(worker), worker.borne)

    def _limit(self, worker: _Worker) -> float:
        if worker.marks < WARM_UP:
            return max(FIRST_FLOOR, self._timeout)
        return max(self._timeout, AUTO_FACTOR * worker.pause) if self._auto else self._timeout

    def _is_sure(self, worker: _Worker) -> bool:
        """Whether its silence is measured by the number of seconds that was given."""
        return not self._auto and worker.marks >= WARM_UP


def _place(worker: _Worker) -> tuple[int, int]:
    return worker.marks, -worker.rank


def _first_step(begun: list[_Worker]) -> int | None:
    """Where it is not told each mark is taken for a step, with the latest: some may not be numbered yet."""
    told = [worker.first_step for worker in begun if worker.first_step is not None]
    if told:
        return min(told)
    firsts = [worker.step - (worker.marks - 1) for worker in begun if worker.step is not None]
    return max(0, *firsts) if firsts else None
