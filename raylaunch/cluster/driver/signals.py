"""Signals to the driver: before the run starts they interrupt it; afterwards they become events of the run.

A process that is stuck, perhaps in a system call that no signal interrupts, must obey too. So the third signal to end a
run, and the first one when the run is over, end the process if it does not end by itself. Nothing is left behind then:
what the driver started ends when its connections close.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import SignalName
from raylaunch.errors import ExitCode, InterruptedByUserError, signal_exit_code

LEAVE_SECONDS = 2.0
"""How long the process may take to end by itself; after that it is interrupted, and then ended."""
_SIGNALS_TO_END = 3
"""The state machine ends the run with grace at the first signal, and without at the second."""


class Signals:
    """The handlers of the signals that a job names. They do nothing if the run is not in the main thread."""

    def __init__(self, job: Job) -> None:
        self._forwarded = {signal.Signals[name] for name in job.signals_to_forward}
        # Like torchrun, ignore names that this system does not know.
        stops = {signal.Signals[name] for name in job.signals_to_handle if name in signal.Signals.__members__}
        if job.grace:
            stops |= {signal.SIGUSR1} - self._forwarded
        self._has_grace = bool(job.grace)
        #: A signal that was ignored when the program began stays ignored: `nohup` means it.
        self._before: dict[signal.Signals, Any] = {
            number: handler
            for number in stops | self._forwarded
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }
        self._stops = stops
        self.is_main = threading.current_thread() is threading.main_thread()
        self._listener: _SignalListener | None = None
        #: Signals to forward that came before `go_to`.
        self._early: list[SignalName] = []

    def go_to(self, tell: Callable[[SignalName], None]) -> None:
        """Call `tell` with the name of each signal from now on, instead of interrupting.

        Installs the handlers again, in case a library replaced them. `tell` is called in a thread, but here for signals
        to forward that came before. The third signal to end the run ends this process.
        """
        if not self.is_main:
            return
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._before)  # handlers of those that came run in here
            for name in self._early:
                tell(name)
            self._listener = _SignalListener(self._before.keys(), self._stops, tell)
            self._listener.start()
            self.install()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def interrupt_main_thread(self) -> None:
        """From now on the first signal to end the run interrupts the main thread, the second ends the process."""
        if self._listener is not None:
            self._listener.signals_to_end = 2
            self._listener.interrupts = True

    def run_is_over(self) -> None:
        """From now on one signal ends the process, unless it ends by itself: only cleaning up is left to do."""
        if self._listener is not None:
            self._listener.signals_to_end = 1
            self._listener.interrupts = False

    def install(self) -> None:
        """Install the handlers of the signals that end the run or are forwarded to its workers."""
        if self.is_main:
            for number in self._before:
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the handlers that were installed before."""
        if not self.is_main:
            return
        for number, handler in self._before.items():
            if handler is not None:  # None: C code installed it, and Python cannot restore it
                signal.signal(number, handler)
        if self._listener is not None:
            self._listener.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._listener is None and number in self._forwarded:
            self._early.append(SignalName(signal.Signals(number).name))
        if (self._listener is None or self._listener.interrupts) and number not in self._forwarded:
            raise self.interruption(number)

    def interruption(self, number: int) -> InterruptedByUserError:
        """Return the error of a signal that did not become an event of the run."""
        is_before = self._listener is None
        when = "before anything was started" if is_before else "while the run ended"
        error = InterruptedByUserError(f"stopped by {signal.Signals(number).name} {when}")
        error.exit_code = ExitCode.RESUMABLE if is_before and self._has_grace else signal_exit_code(number)
        return error


class _SignalListener:
    """Receives signals in a thread of its own, by `signal.set_wakeup_fd`.

    Python runs a handler when the main thread next executes bytecode. A signal that arrives just before that thread
    blocks, or that the kernel delivers to one of Ray's threads, would wait for the next event, perhaps for ever.
    """

    def __init__(
        self, numbers: Iterable[signal.Signals], stops: Iterable[signal.Signals], tell: Callable[[SignalName], None]
    ) -> None:
        """`stops`: the signals that end the run."""
        self._numbers = frozenset(numbers)
        self._stops = frozenset(stops)
        self._tell = tell
        #: Which of the next signals to end the run ends the process.
        self.signals_to_end = _SIGNALS_TO_END
        #: Whether the next signal interrupts the main thread.
        self.interrupts = False
        self._closed = threading.Event()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        self._before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="raylaunch-signals")

    def start(self) -> None:
        """Tell of signals from now on, also of those that have come since this object was made."""
        self._thread.start()

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # the main thread may not take any for a while
        while numbers := os.read(self._readable, 64):
            for number in numbers:
                if number in self._numbers:
                    self._tell(SignalName(signal.Signals(number).name))
                if number in self._numbers & self._stops:
                    self.signals_to_end -= 1
                    if self.signals_to_end == 0:
                        self._begin_to_end_process(number)
        os.close(self._readable)

    def _begin_to_end_process(self, number: int) -> None:
        """End the process, in a thread where one can be started, so that further signals are told meanwhile."""
        thread = threading.Thread(target=self._end_process, args=(number,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread"
            self._end_process(number)

    def _end_process(self, number: int) -> None:
        """Make the main thread raise InterruptedByUserError, then end the process, unless it ends by itself."""
        if self._closed.wait(LEAVE_SECONDS):
            return
        self.interrupts = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._closed.wait(LEAVE_SECONDS):
            os._exit(signal_exit_code(number))

    def close(self) -> None:
        self._closed.set()
        signal.set_wakeup_fd(self._before)
        os.close(self._writable)
        if self._thread.ident is not None:  # else no thread could be started
            self._thread.join(LEAVE_SECONDS)


@contextlib.contextmanager
def handled(job: Job) -> Iterator[Signals]:
    """Handle the job's signals for the time of a run."""
    signals = Signals(job)
    signals.install()
    try:
        yield signals
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        # By the handler that `ray.init` installs, which is there until `go_to`.
        raise signals.interruption(signal.SIGTERM) from None
    finally:
        signals.restore()
