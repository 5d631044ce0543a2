"""The interface by which the driver shows a run to a person, and a guard for what is behind it."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from raylaunch.core.job.job import Job
from raylaunch.core.machine.machine import Machine
from raylaunch.core.monitoring.progress_report import ProgressSample
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.text import printable
from raylaunch.node.logs.tail import LogOutput


class RunObserver(Protocol):
    """Shows the run to a person: the terminal. Called in the driver's thread, which waits for it."""

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The run begins. `run_dir`: the path of the run folder, `""` if nothing is kept."""

    def on_takeover(self, job: Job, run_dir: str) -> None:
        """The run, which another driver has begun, goes on with this one. Called instead of `on_plan`."""

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """The machine handled an event; `machine` is its state afterwards."""

    def on_progress(self, sample: ProgressSample) -> None:
        """How far the attempt is: about once a second while its workers run."""

    def on_output(self, output: Iterable[LogOutput]) -> None:
        """Workers whose output is shown wrote something."""

    def on_message(self, text: str) -> None:
        """Show a line that is not about a decision of the machine."""


class GuardedObserver:
    """Passes everything on to another observer, whose exceptions do not reach the driver: training goes on.

    Each kind of exception is reported once, to the other observer's `on_message`, or on stderr if that fails too.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._reported: set[str] = set()

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """Pass on that the run begins; see `RunObserver`."""
        with self._guarded("the plan"):
            self._observer.on_plan(job, plan, run_dir)

    def on_takeover(self, job: Job, run_dir: str) -> None:
        """Pass on that this driver goes on with the run."""
        with self._guarded("a takeover"):
            self._observer.on_takeover(job, run_dir)

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """Pass on an event that the machine handled."""
        with self._guarded("a change of the run"):
            self._observer.on_entry(entry, machine)

    def on_progress(self, sample: ProgressSample) -> None:
        """Pass on how far the attempt is."""
        with self._guarded("the progress"):
            self._observer.on_progress(sample)

    def on_output(self, output: Iterable[LogOutput]) -> None:
        """Pass on what workers wrote whose output is shown."""
        with self._guarded("the output of workers"):
            self._observer.on_output(output)

    def on_message(self, text: str) -> None:
        """Pass on a line for a person."""
        with self._guarded("a message"):
            self._observer.on_message(text)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            kind = f"{type(error).__name__} at {place_of(error)}"
            if kind not in self._reported:
                self._reported.add(kind)
                text = f"{what} could not be shown: {described(error)}; the run goes on (this is a bug in raylaunch)"
                _say_somehow(text, self._observer.on_message)


def described(error: BaseException) -> str:
    """Return an exception with the place that raised it, for the report of a bug."""
    return f"{type(error).__name__}: {error} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame; "" if it was not raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _say_somehow(text: str, said: Callable[[str], None]) -> None:
    try:
        said(text)
    except Exception:  # noqa: BLE001
        with contextlib.suppress(Exception):
            sys.stderr.write(f"raylaunch: {printable(text)}\n")
