"""A checkpoint that was asked for: whether all workers of the node have it. They say so on the page, in no hurry of
ours, so that is looked at again and again, while one is asked for.

All workers of all nodes must save at one step. So a step is proposed first: workers that come to it wait. When every
node has said how far its workers were by then, the driver settles it, or proposes another that nobody has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.node.present import Present
from raylaunch.worker import page as fields
from raylaunch.worker.page import Page

LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The step that all have saved; None: some of them cannot be asked."""

    attempt: int
    step: int | None


class Asking:
    """At most one checkpoint at a time."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._attempt: int | None = None

    def ask(self, attempt: int, step: int, present: Present | None) -> int | None:
        """Propose this step, or the first after it that they ask about; `look` gives the answer when it was settled.

        Returns the last step that any of them had passed when they could know; None: they cannot be asked.
        """
        self._attempt = attempt
        if present is None or present.attempt != attempt or not _can_be_asked(self._page, present):
            return None
        self._page.numbers[fields.ASK] = step + 1
        return max(self._page.numbers[slot + fields.ASKED] for slot in _slots(present)) - 1

    def settle(self, attempt: int, step: int) -> None:
        """The step that was proposed last is the one."""
        if self._attempt == attempt and self._page.numbers[fields.ASK] == step + 1:
            self._page.numbers[fields.SETTLED] = step + 1

    def drop(self) -> None:
        """Nobody waits for the answer any more; whoever waits for a step to be settled goes on."""
        self._attempt = None
        if self._page.numbers[fields.SETTLED] != self._page.numbers[fields.ASK]:
            self._page.numbers[fields.ASK] = self._page.numbers[fields.SETTLED] = 0

    @property
    def is_open(self) -> bool:
        """Whether there is something to look for."""
        return self._attempt is not None

    def look(self, present: Present | None) -> Answer | None:
        """The answer, once: as soon as it is known."""
        attempt = self._attempt
        if attempt is None:
            return None
        step = None
        if present is not None and present.attempt == attempt and _can_be_asked(self._page, present):
            slots = _slots(present)
            if not all(self._page.numbers[slot + fields.WAITING] for slot in slots):
                return None
            step = min(self._page.numbers[slot + fields.SAVED] for slot in slots) - 1
        self._attempt = None
        return Answer(attempt=attempt, step=step)


def _can_be_asked(page: Page, present: Present) -> bool:
    """Whether there are workers, and each of them has looked for being asked before."""
    slots = _slots(present)
    has_slots = bool(slots) and len(present.pids) <= fields.MOST_WORKERS
    return has_slots and all(page.numbers[slot + fields.ASKED] for slot in slots)


def _slots(present: Present) -> list[int]:
    return [fields.slot(local_rank) for local_rank, _, _ in present.live()]
