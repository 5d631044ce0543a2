"""The wait for SIGTERM after a checkpoint that `should_checkpoint` asked for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raylaunch.worker.heartbeats import slot_owner
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.02
"""Between two looks at the lease, and at whether the request still stands."""


def wait_for_stop(writer: HeartbeatWriter, completed: int) -> None:
    """Wait for a signal that ends the script, or until the request for a checkpoint is withdrawn.

    A signal without a handler ends the process. An exception of the script's handler is raised here. After a handler
    that returns, this returns too, because the script then wants to end by itself.
    """
    with _handler_calls_counted() as handler_called:
        writer.set_waiting(True)
        try:
            while writer.is_save_committed(completed) and not handler_called():
                writer.record_alive()
                time.sleep(_POLL_SECONDS)
        finally:
            writer.set_waiting(False)


def wait_instead_of_exiting() -> None:
    """Wait if the script ends with exit code 0 after `should_checkpoint` returned True, without `checkpointed`.

    Such a script has saved, but its training is not finished, as exit code 0 would say.
    """
    writer = slot_owner.current_writer()
    if writer is not None and writer.save_in_progress:
        completed = writer.save_in_progress
        writer.record_saved(completed)
        wait_for_stop(writer, completed)


@contextmanager
def _handler_calls_counted() -> Iterator[Callable[[], bool]]:
    """Wrap the script's signal handlers; the function that is given tells whether one of them was called."""
    called: list[int] = []
    originals = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                originals[number] = handler

    def wrapper(number: int, frame: object) -> None:
        called.append(number)
        originals[signal.Signals(number)](number, frame)  # type: ignore[arg-type]

    for number in originals:
        signal.signal(number, wrapper)
    try:
        yield lambda: bool(called)
    finally:
        for number, handler in originals.items():
            if signal.getsignal(number) is wrapper:  # the handler may have installed another one
                signal.signal(number, handler)
