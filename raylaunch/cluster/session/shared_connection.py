"""The one connection to a cluster that a process can have. It stays open while a run uses it or agents are idle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


@dataclass(slots=True)
class _OpenConnection(Generic[Made]):
    made: Made
    options: Any
    runs: int = 0
    """How many runs use it right now."""


class SharedConnection(Generic[Made]):
    """A connection that is made for the first run that needs it, and closed by `end` once no run uses it."""

    def __init__(self, end: Callable[[Made], None]) -> None:
        """`end` closes the connection that nobody uses any more."""
        self._end = end
        self._lock = threading.RLock()
        self._open: _OpenConnection[Made] | None = None

    @property
    def made(self) -> Made | None:
        """The connection that is open; None: none is."""
        return self._open.made if self._open is not None else None

    def serves(self, options: Any) -> bool:
        """Return whether a connection is open that was made for equal options."""
        return self._open is not None and self._open.options == options

    @contextlib.contextmanager
    def used(self, options: Any, make: Callable[[], Made]) -> Iterator[Made]:
        """Use the connection for a run; it stays open afterwards. `make` opens one unless one serves these options.

        Runs in two threads may share it if their options are equal.
        """
        with self._lock:
            if not self.serves(options):
                self.end()
                self._open = _OpenConnection(make(), options)
            used = self._open
            assert used is not None
            used.runs += 1
        try:
            yield used.made
        finally:
            with self._lock:
                used.runs -= 1

    def end(self) -> None:
        """Close the connection, unless a run uses it."""
        with self._lock:
            if self._open is not None and not self._open.runs:
                ending, self._open = self._open, None
                self._end(ending.made)
