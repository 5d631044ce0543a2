"""Signals to the driver: before there is a run they interrupt, afterwards they are an event like any other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from raylaunch.core.job import Job
from raylaunch.errors import InterruptedByUserError, stopped_by


class Signals:
    """What signals to the driver do. Only the main thread may have them; elsewhere they are the caller's business."""

    def __init__(self, job: Job) -> None:
        self._forwarded = {signal.Signals[name] for name in job.signals_to_forward}
        # Names that this system does not know are left out, as torchrun leaves them out.
        stops = {signal.Signals[name] for name in job.signals_to_handle if name in signal.Signals.__members__}
        #: A signal that was ignored when the program began stays ignored: `nohup` means it.
        self._before: dict[signal.Signals, Any] = {
            number: handler
            for number in stops | self._forwarded
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }
        self._is_main = threading.current_thread() is threading.main_thread()
        self._listener: _Listener | None = None

    def go_to(self, tell: Callable[[str], None]) -> None:
        """From now on, tell this instead of interrupting. Also takes the signals back from whoever took them."""
        if self._is_main:
            self._listener = _Listener(self._before.keys(), tell)
            self.install()

    def install(self) -> None:
        """Begin."""
        if self._is_main:
            for number in self._before:
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back what was there before."""
        if not self._is_main:
            return
        for number, handler in self._before.items():
            if handler is not None:  # one that C code had installed is not ours to put back
                signal.signal(number, handler)
        if self._listener is not None:
            self._listener.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._listener is None and number not in self._forwarded:
            error = InterruptedByUserError(f"stopped by {signal.Signals(number).name} before anything was started")
            error.exit_code = stopped_by(number)
            raise error


class _Listener:
    """Hears signals in a thread of its own.

    A handler in Python runs when the main thread next does something. A signal that comes just before that thread
    blocks, or that the kernel hands to one of Ray's threads, would wait for the next event, for ever perhaps.
    """

    def __init__(self, numbers: Iterable[signal.Signals], tell: Callable[[str], None]) -> None:
        self._numbers = frozenset(numbers)
        self._tell = tell
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        self._before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="raylaunch-signals")
        self._thread.start()

    def _listen(self) -> None:
        while numbers := os.read(self._readable, 64):
            for number in numbers:
                if number in self._numbers:
                    self._tell(signal.Signals(number).name)
        os.close(self._readable)

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._writable)
        self._thread.join()


@contextlib.contextmanager
def handled(job: Job) -> Iterator[Signals]:
    """While a run is on, and only then."""
    signals = Signals(job)
    signals.install()
    try:
        yield signals
    finally:
        signals.restore()
