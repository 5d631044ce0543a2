"""`raylaunch.start`: begin a run, and return a handle of it at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from raylaunch.cli.api import CheckedLaunch, checked_launch
from raylaunch.cli.runs import follow_logs
from raylaunch.cli.runs.known_runs import KnownRun
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary, summary
from raylaunch.cli.runs.worker_logs import LogChoice
from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.cluster.driver.run_registry import DriverProcess
from raylaunch.cluster.driver.signals import SentSignals
from raylaunch.core.job.job import Job
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import SignalName
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record.result import RunResult
from raylaunch.core.record.run_layout import LOGS
from raylaunch.errors import ExitCode, InterruptedByUserError, RunStoppedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raylaunch.cli.config.job_settings import JobSettings

Returned = TypeVar("Returned")
Value_co = TypeVar("Value_co", covariant=True)

_SIGNALS = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")
"""`stop` sends the first one that the job does not forward to its workers."""


@overload
def start(
    function: Callable[..., Returned],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    **settings: Unpack[JobSettings],
) -> Handle[list[Returned]]: ...
@overload
def start(
    *, script: str | os.PathLike[str], args: Sequence[object] = ..., **settings: Unpack[JobSettings]
) -> Handle[RunResult]: ...
@overload
def start(*, module: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> Handle[RunResult]: ...
@overload
def start(*, command: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> Handle[RunResult]: ...
def start(
    function: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    command: str | None = None,
    **settings: Any,
) -> Handle[Any]:
    """Begin a run as `launch` does, and return a `Handle` of it at once.

    A thread of this process drives the run, which ends with the process. Several runs may go on at once. Signals to the
    process are not the run's: it is ended by `Handle.stop`.

    The arguments are those of `launch`.

    :raises TypeError: an argument is of another kind. Nothing was started.
    :raises ConfigError: a setting is wrong, or there is no such script.
    """
    programs = {"script": script, "module": module, "command": command}
    return Handle(checked_launch("start", function, args, kwargs, programs, settings))


class Handle(Generic[Value_co]):
    """A run that goes on in this process. Any thread may use it.

    `await handle` waits as `result` does, and gives the same. Where the task that waits is cancelled, the run goes on.
    """

    def __init__(self, checked: CheckedLaunch) -> None:
        """Begin the run in a daemon thread."""
        self._checked = checked
        self._sent = SentSignals()
        self._lock = threading.Lock()
        began = datetime.now(timezone.utc).isoformat()
        self._run = _known_run(checked.job, "", began)
        self._has_plan = False
        self._future: Future[Value_co] = Future()
        self._future.set_running_or_notify_cancel()  # nobody can cancel it, as an awaiting task would
        threading.Thread(target=self._drive, daemon=True, name=f"raylaunch-{checked.job.title}").start()

    def __repr__(self) -> str:
        return f"<raylaunch.Handle of {self._run.title.rstrip()}: {self.status().state}>"

    def _drive(self) -> None:
        try:
            outcome = self._checked.run(self._sent, lambda observer: _FolderObserver(observer, self._on_folder))
            value: Any = self._checked.value(outcome)
        except (
            InterruptedByUserError
        ) as error:  # a KeyboardInterrupt would end an event loop, and nobody pressed Ctrl-C
            self._future.set_exception(RunStoppedError(error.message, exit_code=error.exit_code))
        except BaseException as error:  # noqa: BLE001
            self._future.set_exception(error)
        else:
            self._future.set_result(value)

    def _on_folder(self, job: Job, run_dir: str) -> None:
        with self._lock:
            self._run = _known_run(job, run_dir, self._run.began)
            self._has_plan = True

    @property
    def run_dir(self) -> str:
        """The path of the run folder; `""`: nothing is kept, or the folder is not made yet."""
        return self._run.folder

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Value_co:
        """Wait for the end of the run, and return what `launch` would: results by rank, or the `RunResult`.

        :param timeout: seconds; None: without a limit.
        :raises TimeoutError: the run has not ended by then. It goes on.
        :raises RunStoppedError: `stop` ended the run.
        :raises JobFailedError: as `launch` does. So are the other errors.
        """
        if not self._wait(timeout):
            msg = f"{self._run.title} has not ended within {timeout:g} s; it goes on"
            raise TimeoutError(msg)
        return self._future.result()

    def _wait(self, timeout: float | None) -> bool:
        ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())
        return ended.wait(timeout)

    def __await__(self) -> Generator[Any, None, Value_co]:
        return asyncio.wrap_future(self._future).__await__()

    def stop(self, *, now: bool = False) -> None:
        """Tell the run to end, and return at once. `result` then raises RunStoppedError.

        The workers get SIGTERM, and SIGKILL after `shutdown_timeout`. A run that has ended is left as it is.

        :param now: do not wait for the workers.
        """
        forwarded = self._checked.job.signals_to_forward
        name = SignalName(next((name for name in _SIGNALS if name not in forwarded), _SIGNALS[0]))
        self._sent.send(name)
        if now:
            self._sent.send(name)  # the state machine ends a run at once at the second

    def status(self) -> RunSummary:
        """Return what `raylaunch status` shows of the run, as of now.

        If nothing is kept (`log_dir="/dev/null"`), its state is `unknown` until it ends.
        """
        with self._lock:
            shown = summary(self._run, datetime.now(timezone.utc))
        if shown.state == Phase.DONE:
            return shown
        error = self._future.exception() if self._future.done() else None
        if error is not None:  # it ended before it had a journal, or keeps none
            code = getattr(error, "exit_code", ExitCode.INTERNAL)
            return replace(shown, state=Phase.DONE, exit_code=code, why=str(error), problem="")
        if self._future.done():
            return replace(shown, state=Phase.DONE, exit_code=ExitCode.OK, problem="")
        if not self._has_plan:
            return replace(shown, state=Phase.GATHERING, waits_for="the cluster's answer", problem="")
        return shown

    def logs(
        self, *, ranks: int | Iterable[int] | None = None, attempt: int | None = None, tail: int | None = None
    ) -> str:
        """Return what workers have written, stdout and stderr, by rank; `""` if nothing is kept.

        :param ranks: a rank, or several; None: all.
        :param attempt: its number; None: the present or last one.
        :param tail: so many last lines of each file; None: all.
        """
        chosen = (ranks,) if isinstance(ranks, int) else ranks
        choice = LogChoice(
            streams=tuple(LOGS),
            ranks=None if chosen is None else tuple(range(rank, rank + 1) for rank in chosen),
            lines=tail,
            pattern=None,
            is_prefixed=True,
        )
        with self._lock:
            self._run.reader.refresh()
            status = self._run.reader.status()
            if status is None or not self._run.folder:
                return ""
            found = follow_logs.attempt_logs(self._run, choice, attempt or status.attempt, status)
        return b"".join(found.last(whole=True)).decode(errors="replace")


def _known_run(job: Job, run_dir: str, began: str) -> KnownRun:
    """Return the run of this process, as `summary` takes it. `run_dir`: `""` before it has a folder."""
    return KnownRun(
        id=os.path.basename(run_dir),
        name=job.title,
        folder=run_dir,
        began=began,
        cluster="",
        driver=DriverProcess.this(),
        signals=(),
        exit_code=None,
        reader=RunReader(run_dir),
    )


class _FolderObserver:
    """Passes everything on to another observer; also tells which folder a run has."""

    def __init__(self, observer: RunObserver, on_folder: Callable[[Job, str], None]) -> None:
        self._observer = observer
        self._on_folder = on_folder
        self.on_entry = observer.on_entry
        self.on_output = observer.on_output
        self.on_progress = observer.on_progress
        self.on_message = observer.on_message

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """Pass on that the run begins."""
        self._on_folder(job, run_dir)
        self._observer.on_plan(job, plan, run_dir)
