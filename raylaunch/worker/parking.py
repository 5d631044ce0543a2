"""Waiting, after the checkpoint that was asked for, to be ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raylaunch.worker import attach
from raylaunch.worker.watch import Watch

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK = 0.02
"""Seconds between two looks at the lease, and at whether the wish still stands."""


def park(watch: Watch, done: int) -> None:
    """Wait as long as the checkpoint of so many steps is the one that was asked for.

    A signal without a handler ends the process, a handler that raises is raised out of here, and after one of the
    script's own that returns this returns too: such a script wants to end by itself.
    """
    with _told_by_handlers() as told:
        watch.waits(True)
        try:
            while watch.is_due(done) and not told():
                watch.sign_of_life()
                time.sleep(_LOOK)
        finally:
            watch.waits(False)


def park_instead_of_an_end() -> None:
    """Wait, where the script ends well right after it was told to save: it has saved, and its training is not over.

    An exit code of 0 would say that it is.
    """
    watch = attach.present()
    if watch is not None and watch.saving:
        done = watch.saving
        watch.saved(done)
        park(watch, done)


@contextmanager
def _told_by_handlers() -> Iterator[Callable[[], bool]]:
    """Whether a signal that ends runs came and the script's own handler for it returned."""
    came: list[int] = []
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                replaced[number] = handler

    def note(number: int, frame: object) -> None:
        came.append(number)
        replaced[signal.Signals(number)](number, frame)  # type: ignore[arg-type]

    for number in replaced:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in replaced.items():
            if signal.getsignal(number) is note:  # the handler itself may have set another
                signal.signal(number, handler)
