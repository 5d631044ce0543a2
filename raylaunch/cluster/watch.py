"""Follows an attempt by its workers' signs of life: says how far it is now and then, and whether it hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.hang import Inquiry
from raylaunch.core.events import Event, Progressed, WorkersHung, WorkersStarted
from raylaunch.core.evidence import longest, patience, seen, told
from raylaunch.core.progress import Progress
from raylaunch.core.pulse import Pulse
from raylaunch.core.ranks import Assignment
from raylaunch.node.messages import WorkersStacks

_REPORT_SECONDS = 60.0
_LOOK_SECONDS = 0.25
"""Signs of life of a thousand nodes are looked through together."""
_NEVER = float("inf")


class Watch:
    """The present attempt's. Times are seconds since the run began."""

    def __init__(
        self,
        progress: Progress,
        fleet: Fleet,
        write_stacks: Callable[[int, str], None],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`write_stacks` keeps, for a person, what the workers of an attempt that hung were doing.

        `say` tells a person of a long silence that is no hang.
        """
        self._progress = progress
        self._fleet = fleet
        self._write_stacks = write_stacks
        self._say = say
        #: How often a world was ended at this place, though it may only have been slow there.
        self._ended_at: Counter[str] = Counter()
        self._parts: Sequence[Assignment] = ()
        self._attempt = 0
        self._begin()

    def begin(self, parts: Sequence[Assignment]) -> None:
        """Another attempt is told to start: nothing of the one before counts any more."""
        self._parts = parts
        self._attempt = parts[0].attempt
        self._progress.begin(self._attempt, range(parts[0].world_size))
        self._begin()

    def _begin(self) -> None:
        self._pids: dict[str, tuple[int, ...]] = {}
        self._said: Progressed | None = None
        self._report_at = _NEVER
        self._looked_at = -_NEVER
        self._look_at = _NEVER
        self._inquiry: Inquiry | None = None
        self._hung = False

    def ask_at(self, now: float) -> int:
        """A step that no worker has come to yet, a little ahead of all."""
        return self._progress.ask_at(now)

    def unsaved(self, step: int) -> str:
        """Who had not saved at a step at which all were to; `""`: nobody, or none of them ever does."""
        return self._progress.unsaved(step)

    def started(self, word: WorkersStarted) -> None:
        """A node's workers are there."""
        if word.attempt == self._attempt:
            self._pids[word.node] = word.pids

    def take(self, pulse: Pulse, now: float) -> None:
        """A node's signs of life."""
        self._progress.take(pulse, now)
        # Looking through all workers takes its time: at the first steps, for the word of them, then where one may hang.
        due = now if self._said is None else self._progress.due
        self._look_at = min(self._look_at, max(now, due, self._looked_at + _LOOK_SECONDS))

    def stacks(self, word: WorkersStacks) -> None:
        """A node's answer to the question what its workers are doing."""
        if self._inquiry is not None:
            self._inquiry.take(word)

    @property
    def next_look(self) -> float:
        """When `due` has something to do."""
        return min(self._look_at, self._report_at) if self._inquiry is None else self._inquiry.next_look

    def due(self, now: float) -> Iterator[Event]:
        """What is to be said at this time. A hang is asked about first, and told of when the answers are there."""
        if now < self.next_look:
            return
        if self._inquiry is not None:
            yield from self._inquire(self._inquiry, now)
            return
        if self._said is None or now >= self._report_at:
            yield from self.how_far(now)
        self._look(now)

    def how_far(self, now: float) -> Iterator[Progressed]:
        """How far the attempt is, unless that was said."""
        found = self._progress.so_far(now)
        if self._report_at < _NEVER:
            self._report_at = now + _REPORT_SECONDS
        if found is not None and (self._said is None or _news(found, self._said)):
            self._said = found
            self._report_at = now + _REPORT_SECONDS
            yield found

    def _look(self, now: float) -> None:
        self._looked_at = now
        hang = None if self._hung else self._progress.hang(now)
        if hang is not None:
            self._inquiry = Inquiry(hang, self._parts, self._fleet.dump_stacks)
            self._inquiry.begin(now)
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        next_look = None if self._hung else self._progress.next_look(now)
        self._look_at = _NEVER if next_look is None else next_look

    def _inquire(self, inquiry: Inquiry, now: float) -> Iterator[Event]:
        hang = self._progress.hang(now)
        if hang is not None and inquiry.goes_on(hang, now):
            return
        self._inquiry = None
        if hang is not None:
            hung = inquiry.found(now, self._pids)
            if hang.is_sure or not self._bears(inquiry, hung):
                self._hung = True
                yield hung
                self._write_stacks(hung.attempt, inquiry.report(hung))  # the next attempt does not wait for the disk
                return
        self._look_again(now)

    def _bears(self, inquiry: Inquiry, hung: WorkersHung) -> bool:
        """Whether the world is given more time, by what its workers were seen doing."""
        hang, place = inquiry.hang, hung.groups[0].place
        doing = seen(inquiry.looks, (worker.rank for worker in hang.workers))
        most = longest(hang, doing, self._ended_at[place])
        more = patience(hang, most)
        if not more:
            self._ended_at[place] += 1
            return False
        if not (hang.goes_on or hang.is_young):
            self._say(told(hang, doing, hung.groups, most))
        self._progress.bear(hang, more)
        return True


def _news(found: Progressed, said: Progressed) -> bool:
    return (found.marks, found.saved) != (said.marks, said.saved)
