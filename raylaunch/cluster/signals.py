"""Signals to the driver: before there is a run they interrupt, afterwards they are a wish like any other event."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raylaunch.errors import ExitCode, InterruptedByUserError

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class Stops:
    """What SIGINT and SIGTERM do. Handlers only raise or put a word away."""

    def __init__(self) -> None:
        self._ask: Callable[[str], None] | None = None

    def go_to(self, ask: Callable[[str], None]) -> None:
        """From now on, tell this instead of interrupting. Also takes the signals back from whoever took them."""
        self._ask = ask
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self._ask is not None:
            self._ask(name)
            return
        error = InterruptedByUserError(f"stopped by {name} before anything was started")
        error.exit_code = ExitCode(128 + number)
        raise error


@contextlib.contextmanager
def handled() -> Iterator[Stops]:
    """While a run is on, and only then; the handlers before are put back."""
    stops = Stops()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _HANDLED}
    stops._install()  # noqa: SLF001
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
