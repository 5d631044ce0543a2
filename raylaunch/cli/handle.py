"""The handle of a run that this process drives: see `raylaunch.start`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

from raylaunch.cli.api import CheckedLaunch
from raylaunch.cli.runs import follow_logs
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary, summary
from raylaunch.cluster.control.control_client import ControlError
from raylaunch.cluster.control.control_messages import ControlRequest, StopRun
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.core.job.job import Job
from raylaunch.core.machine.state import Phase
from raylaunch.errors import ExitCode, InterruptedByUserError, RunStoppedError, end_state

Returned = TypeVar("Returned")
Value_co = TypeVar("Value_co", covariant=True)

_STOPPER = "Handle.stop"
"""The name by which messages say that this stopped a run."""


class Handle(Generic[Value_co]):
    """A run that goes on in this process. Any thread may use it.

    `await handle` waits and returns as `result` does. If the waiting task is cancelled, the run goes on.
    """

    def __init__(self, checked: CheckedLaunch) -> None:
        """Begin the run in a daemon thread."""
        self._checked = checked
        self._control: RunControl | None = None
        #: Requests that the run has not got.
        self._stops: deque[StopRun] = deque()
        self._lock = threading.Lock()
        began = datetime.now(timezone.utc).isoformat()
        self._run = RunReader(_entry(checked.job, "", began))
        self._future: Future[Value_co] = Future()
        self._future.set_running_or_notify_cancel()  # nobody can cancel it, as an awaiting task would
        threading.Thread(target=self._drive, daemon=True, name=f"raylaunch-{checked.job.title}").start()

    def __repr__(self) -> str:
        return f"<raylaunch.Handle of {self._run.entry.title.rstrip()}: {self.status().state}>"

    def _drive(self) -> None:
        try:
            value: Any = self._checked.value(self._checked.run(self._begun))
        except InterruptedByUserError as error:  # it would end an event loop, and nobody pressed Ctrl-C
            self._future.set_exception(RunStoppedError(error.message, exit_code=error.exit_code))
        except BaseException as error:  # noqa: BLE001
            self._future.set_exception(error)
        else:
            self._future.set_result(value)

    def _begun(self, control: RunControl) -> None:
        with self._lock:
            self._run = RunReader(_entry(self._checked.job, control.run_dir, self._run.entry.began))
            self._control = control
        self._send_stops()

    def _send_stops(self) -> None:
        with contextlib.suppress(IndexError):
            while self._control is not None and not self._control.is_over:
                self._control.change(self._stops.popleft())

    @property
    def _is_open(self) -> bool:
        """Whether there is a run to ask now: it has begun, and its workers have not ended."""
        return self._control is not None and not self._control.is_over

    def _now(self) -> RunReader:
        """Return the run with what can be asked of it now."""
        if self._is_open and self._control is not None and not self._run.has_driver:
            self._run = RunReader(self._run.entry, client=_OwnDriver(self._control))
        return self._run

    @property
    def run_dir(self) -> str:
        """The path of the run folder; `""`: nothing is kept, or the folder is not made yet."""
        return self._run.entry.folder

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Value_co:
        """Wait for the end of the run, and return what `launch` would: results by rank, or the `RunResult`.

        :param timeout: seconds; None: without a limit.
        :raises TimeoutError: the run has not ended by then. It goes on.
        :raises RunStoppedError: `stop` ended the run.
        :raises JobFailedError: as `launch` does, and its other errors too.
        """
        if not self._wait(timeout):
            msg = f"{self._run.entry.title} has not ended within {timeout:g} s; it goes on"
            raise TimeoutError(msg)
        return self._future.result()

    def _wait(self, timeout: float | None) -> bool:
        ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())
        return ended.wait(timeout)

    def __await__(self) -> Generator[Any, None, Value_co]:
        return asyncio.wrap_future(self._future).__await__()

    def stop(self, *, grace: float = 600.0, now: bool = False) -> None:
        """Tell the run to end, and return at once. `result` then raises RunStoppedError.

        As with `raylaunch stop`, all workers save at one step, if they call `should_checkpoint`. Then they get SIGTERM,
        and SIGKILL after `shutdown_timeout`. A run that has ended is left as it is.

        :param grace: seconds that the workers may take to save; 0: they do not save.
        :param now: do not wait for the workers.
        """
        if not grace >= 0:
            msg = f"`grace` is a number of seconds, 0 or more, not {grace!r}"
            raise ValueError(msg)
        self._stops.append(StopRun(by=_STOPPER, save_seconds=grace, at_once=now))
        self._send_stops()

    def status(self) -> RunSummary:
        """Return what `raylaunch status` shows of the run, as of now."""
        with self._lock:
            shown = summary(self._now())
        if shown.exit_code is not None:
            return shown
        error = self._future.exception() if self._future.done() else None
        if error is not None:  # it ended before it had a journal, or keeps none
            code = getattr(error, "exit_code", ExitCode.INTERNAL)
            return replace(shown, state=end_state(code), exit_code=code, why=str(error), problem="")
        if self._future.done():
            return replace(shown, state=end_state(ExitCode.OK), exit_code=ExitCode.OK, problem="")
        if self._control is None:
            return replace(shown, state=Phase.GATHERING, waits_for="the cluster's answer", problem="")
        return shown

    def logs(
        self, *, ranks: int | Iterable[int] | None = None, attempt: int | None = None, tail: int | None = None
    ) -> str:
        """Return what workers have written, stdout and stderr, by rank; `""` if nothing is kept.

        While the run lasts, the files of all nodes are read, wherever these are; afterwards those in the run folder.

        :param ranks: a rank, or several; None: all.
        :param attempt: its number; None: the present or last one.
        :param tail: number of last lines of each file; None: all.
        """
        with self._lock:
            was_open, found = self._is_open, follow_logs.text(self._now(), ranks, attempt, tail)
            if was_open and not self._is_open:  # its agents may have ended meanwhile
                found = follow_logs.text(self._now(), ranks, attempt, tail)
        return found


def _entry(job: Job, run_dir: str, began: str) -> RegisteredRun:
    """Return what is known of the run of this process. `run_dir`: `""` before it has a folder."""
    return RegisteredRun(
        id=os.path.basename(run_dir), name=job.title, folder=run_dir, began=began, driver=DriverProcess.this()
    )


class _OwnDriver:
    """Asks the driver in this process."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def ask(self, request: ControlRequest) -> Any:
        """Return the answer. Raises ControlError when the workers have ended, and RefusedError."""
        if self._control.is_over:
            raise ControlError("the run has ended")
        try:
            return self._control.answer(request)
        except (OSError, RuntimeError) as error:  # its agents are gone
            raise ControlError(str(error)) from None

    def close(self) -> None:
        """Do nothing: there is no connection."""
