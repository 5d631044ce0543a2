"""The one connection to a cluster that a process can have: for the time of a run, and for as long as agents rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


@dataclass(slots=True)
class _Open(Generic[Made]):
    made: Made
    asked: Any
    runs: int = 0


class Connection(Generic[Made]):
    """It is made when the first run needs it; who made it ends it, when no run has it any more."""

    def __init__(self, end: Callable[[Made], None]) -> None:
        self._end = end
        self._lock = threading.RLock()
        self._open: _Open[Made] | None = None

    @property
    def made(self) -> Made | None:
        """What there is."""
        return self._open.made if self._open is not None else None

    def serves(self, asked: Any) -> bool:
        """Whether there is one that was made for the same."""
        return self._open is not None and self._open.asked == asked

    @contextlib.contextmanager
    def used(self, asked: Any, make: Callable[[], Made]) -> Iterator[Made]:
        """For a run; it stays open after it. Two runs at a time may share it, if they ask for the same."""
        with self._lock:
            if not self.serves(asked):
                self.end()
                self._open = _Open(make(), asked)
            used = self._open
            assert used is not None
            used.runs += 1
        try:
            yield used.made
        finally:
            with self._lock:
                used.runs -= 1

    def end(self) -> None:
        """Unless a run is on."""
        with self._lock:
            if self._open is not None and not self._open.runs:
                ending, self._open = self._open, None
                self._end(ending.made)
