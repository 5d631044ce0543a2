"""The handle of a run that another process drives: `raylaunch.start(..., detach=True)` and `raylaunch.attach`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

from raylaunch.cli.api import error_of
from raylaunch.cli.config import job_file
from raylaunch.cli.detached import detach
from raylaunch.cli.handle import Handle
from raylaunch.cli.runs import follow_logs, known_runs, run_requests
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary, summary
from raylaunch.cluster.control.control_client import ControlError
from raylaunch.cluster.control.control_messages import RefusedError, StopRun
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ClusterError, InterruptedByUserError, RaylaunchError, RunStoppedError

_POLL_SECONDS = 0.5


def started(job: Job) -> DetachedHandle:
    """Start a run in the background, and return when its workers have started."""
    found = detach.start(job, job_file.dump(Redactor.of(job, os.environ).shown(job)))
    if not found.run_id:
        msg = "the run ended before it began; why is on stderr"
        raise RaylaunchError(msg)
    return attached(found.run_dir or found.run_id)


def attached(text: str | None) -> DetachedHandle:
    """Return the handle of the run that a person means. Raises ConfigError."""
    return DetachedHandle(known_runs.find(text, os.environ))


class DetachedHandle(Handle[RunResult]):
    """A run that another process drives, and that goes on when this process ends."""

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self.status().is_over

    def status(self) -> RunSummary:
        """Return what `raylaunch status` shows of the run, as of now."""
        with self._lock:
            return summary(self._run)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end of the run, and return its result, or raise as `Handle.result` does."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not (found := self.status()).is_over:
            if time.monotonic() >= deadline:
                msg = f"{self._run.entry.title} has not ended within {timeout:g} s; it goes on"
                raise TimeoutError(msg)
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        with self._lock:
            if found.exit_code is not None:
                self._run.await_result()
            status = self._run.status()
        if found.exit_code is None or status is None:
            raise ClusterError(f"{self._run.entry.title} is {found.state}: {found.why}")
        if status.result.ok:
            return status.result
        error = error_of(RunOutcome(result=status.result))
        if isinstance(error, InterruptedByUserError):
            raise RunStoppedError(error.message, exit_code=error.exit_code)
        raise error

    def __await__(self) -> Generator[Any, None, RunResult]:
        return asyncio.to_thread(self.result).__await__()

    def stop(self, *, grace: float = 600.0, now: bool = False) -> None:
        """Tell the run to end, as `Handle.stop` does. Raises ClusterError if its driver cannot be asked."""
        if self.done():
            return
        why = ""
        with self._lock:
            try:
                self._run.client.ask(StopRun(by=run_requests.requester(), save_seconds=grace, at_once=now))
            except (ControlError, RefusedError) as error:
                why = str(error)
        if why and not self.done():
            raise ClusterError(f"the driver of {self._run.entry.title} cannot be asked: {why}")

    def logs(
        self, *, ranks: int | Iterable[int] | None = None, attempt: int | None = None, tail: int | None = None
    ) -> str:
        """Return what workers have written; see `Handle.logs`."""
        is_over = self.done()
        with self._lock:
            if is_over and os.path.isdir(self._run.entry.folder):
                self._run.close()
                self._run = RunReader(replace(self._run.entry, control=None))
            return follow_logs.text(self._run, ranks, attempt, tail)
