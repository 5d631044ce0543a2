"""The worker's side of the page: it writes signs of life and reads words. A microsecond or two, never more."""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic_ns, sleep

from raylaunch.worker import page

_LOOK = 0.001
"""Seconds between two looks at whether all ranks are to save at this step."""


class Watch:
    """One worker's slot. The process that made it writes it; in children that it forks nothing is written any more."""

    def __init__(self, numbers: memoryview, first: int) -> None:
        self._numbers: memoryview | None = numbers
        self._first = first
        self._sections = 0
        self.saving = 0
        """Steps that are done, of the checkpoint that the script was told to write and has not said is written."""
        self._unseen = False
        self._lock = threading.RLock()  # a signal's handler may come in anywhere
        self._marks = numbers[first + page.MARKS]  # of the program before, where a `command` runs several
        self._marks_when_asked = self._marks
        self.counts_itself = False
        """The script tells its steps by `should_checkpoint`; nothing else is to say which step it is at."""
        self._tell_busy()

    def forget(self) -> None:
        """In a forked child: the slot is the parent's."""
        self._numbers = None

    def sign_of_life(self) -> None:
        """Say that there is one; or, where the node counts as lost by now, end here and at once."""
        numbers = self._numbers
        if numbers is None:
            return
        lease = numbers[page.LEASE]
        if lease and page.lease_clock() > lease:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers[self._first + page.MARKED_AT] = monotonic_ns()

    def mark(self, done: int = 0) -> None:
        """A step, or as good as one. `done`: how many the script has done by its own count; 0: not known."""
        self.sign_of_life()
        numbers = self._numbers
        if numbers is None:
            return
        if done and not self.counts_itself:
            if not numbers[self._first + page.FIRST_STEP]:
                numbers[self._first + page.FIRST_STEP] = done
            numbers[self._first + page.STEP] = done
        if not self._marks:
            numbers[self._first + page.FIRST_AT] = numbers[self._first + page.MARKED_AT]
        self._marks = marks = self._marks + 1
        numbers[self._first + page.MARKS] = marks

    def asks(self, done: int) -> bool:
        """The script has done so many steps and asks whether to save. True: yes, at once."""
        if not self.counts_itself:
            self.counts_itself = True
            self._write(page.FIRST_STEP, done)
        if self._marks == self._marks_when_asked:  # no optimizer of torch steps in this loop
            self.mark()
        else:
            self.sign_of_life()
        self._marks_when_asked = self._marks
        self._write(page.STEP, done)
        self._write(page.ASKED, done)
        if not self.is_asked_for(done) or not self._becomes_due(done):
            return False
        self.saving = done
        self._tell_busy()
        return True

    def is_asked_for(self, done: int) -> bool:
        """Whether a checkpoint is wanted after so many steps or fewer, though the step may not be settled."""
        numbers = self._numbers
        return numbers is not None and 0 < numbers[page.ASK] <= done

    def is_due(self, done: int) -> bool:
        """Whether all ranks are to save after so many steps or fewer."""
        numbers = self._numbers
        if numbers is None:
            return False
        ask = numbers[page.ASK]  # read once: another step may be proposed, and settled, between two looks
        return 0 < ask <= done and numbers[page.SETTLED] == ask

    def _becomes_due(self, done: int) -> bool:
        """Wait until it is known whether all ranks can save at this step; some may have passed it already.

        That takes as long as a message to the driver and back. Where nobody decides, the wish is taken back.
        """
        while self.is_asked_for(done):
            if self.is_due(done):
                return True
            self.sign_of_life()
            sleep(_LOOK)
        return False

    def saved(self, done: int) -> None:
        """A checkpoint is written that holds so many steps."""
        self._write(page.SAVED, done)
        self.saving = 0
        self._tell_busy()
        self.sign_of_life()

    def waits(self, yes: bool) -> None:
        """Whether the worker waits for its end."""
        self._write(page.WAITING, int(yes))

    def section(self, by: int) -> None:
        """A section began (1) or ended (-1)."""
        with self._lock:
            self._sections += by
        self._tell_busy()
        self.sign_of_life()

    def cannot_be_seen(self, yes: bool) -> None:
        """Whether steps happen without our hook, as those of a CUDA graph that is replayed do."""
        if self._unseen != yes:
            self._unseen = yes
            self._tell_busy()

    def _tell_busy(self) -> None:
        self._write(page.BUSY, self._sections + bool(self.saving) + self._unseen)

    def _write(self, field: int, value: int) -> None:
        numbers = self._numbers
        if numbers is not None:
            numbers[self._first + field] = value
