"""The run folder: job, plan, journal, stacks and result, as the driver writes them.

A full disk must not end the training, so only `RunFolder.create` raises errors. Only the user may read the folder:
folders have mode 0700 and files 0600. Secrets are never written.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from raylaunch.cluster.driver.observer import described
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.result import RunResult, facts
from raylaunch.core.record.run_layout import LAYOUTS, RunLayout
from raylaunch.core.text import printable
from raylaunch.errors import ConfigError
from raylaunch.worker.runtime.process_setup import encodable

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class RunFolder:
    """The folder of one run. All journal entries are also kept in memory, so that the result needs no disk."""

    def __init__(self, path: Path | None, layout: RunLayout, secrets: Redactor, warn: Callable[[str], None]) -> None:
        """`path` None: nothing is written. `warn` takes a line for a person."""
        self.path = path
        self.entries: list[JournalEntry] = []
        self._layout = layout
        self._secrets = secrets
        self._warn = warn
        self._events: LineWriter | None = None

    @classmethod
    def create(cls, job: Job, run_id: str, warn: Callable[[str], None]) -> RunFolder:
        """Make a new folder, with a number added to its name if that is taken. Raises ConfigError."""
        layout, secrets = LAYOUTS[job.log_layout], Redactor.of(job, os.environ)
        if job.log_dir == run_layout.NOWHERE:
            return cls(None, layout, secrets, warn)
        name = layout.run_dir(title=job.title, run_id=run_id, random=token_hex(4))
        first = path = Path(encodable(str(Path(job.log_dir).absolute() / name)))
        number = 1
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir(_FOLDER_MODE)
                    return cls(path, layout, secrets, warn)
                except FileExistsError:
                    number += 1
                    path = first.with_name(f"{first.name}-{number}")
        except (OSError, ValueError) as error:  # ValueError: no path has a NUL, or half a surrogate pair
            blocked = next((str(above) for above in path.parents if above.is_file()), "")
            why = f"{blocked} is a file" if blocked else getattr(error, "strerror", None) or str(error)
            msg = f"cannot make the run folder {path}: {why}"
            raise ConfigError(msg, hint="`log_dir` says where run folders are made") from None

    @property
    def where(self) -> str:
        """The path; `""` if nothing is written."""
        return "" if self.path is None else str(self.path)

    def open(self, job: Job, job_text: str, plan: Plan, began: str, clock: float) -> None:
        """Write what is known before the first event. `job_text` has no secrets. `clock`: see `journal.header`."""
        if self.path is None:
            return
        self._write(run_layout.JOB, lambda: job_text)
        self._write(run_layout.PLAN, lambda: json.dumps(self._secrets.shown(asdict(plan)), indent=2) + "\n")
        try:
            self._events = LineWriter(_opened(self.path / run_layout.EVENTS), partial(self._warn_of, run_layout.EVENTS))
        except OSError as error:
            self._warn_of(run_layout.EVENTS, error)
            return
        self._events.write(lambda: journal.header(self._secrets.shown(job), began, clock))

    def append(self, entry: JournalEntry) -> None:
        """Append a step of the machine to the journal, without waiting for the disk."""
        self.entries.append(entry)
        if self._events is not None:
            self._events.write(lambda: journal.line(self._secrets.shown(entry)))

    def write_stacks(self, attempt: int, text: str) -> str:
        """Write the stacks of an attempt that hung. Return the file's path; `""` if nothing is written."""
        if self.path is None:
            return ""
        path = Path(self._layout.attempt_dir(str(self.path), attempt)) / run_layout.STACKS
        with contextlib.suppress(OSError):  # it exists, or the user is told below that the file cannot be written
            path.parent.mkdir(_FOLDER_MODE)
        name = str(path.relative_to(self.path))
        self._write(name, lambda: printable(self._secrets.hide(text), several_lines=True))
        return str(path)

    def close(self, result: RunResult) -> None:
        """Write the result and close the journal. The file appears whole, by a rename."""
        if self._events is not None:
            self._events.close()
            self._events = None
        self._write(run_layout.RESULT, lambda: json.dumps(self._secrets.shown(facts(result)), indent=2) + "\n")

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.path is None:
            return
        target = self.path / name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _opened(aside) as file:
                file.write(text())
            aside.replace(target)
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(OSError):
                aside.unlink()
            self._warn_of(name, error)

    def _warn_of(self, name: str, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else f"{described(error)} (this is a bug in raylaunch)"
        self._warn(f"cannot write {self.where}/{name}: {why}; the run goes on without it")


def _opened(path: Path) -> TextIO:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
    return os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace")


class LineWriter:
    """Writes lines to a file in order, in a thread of its own, so that the caller never waits for the disk."""

    def __init__(self, file: TextIO, failed: Callable[[Exception], None]) -> None:
        """`failed` is called once, in the thread, if a write fails; nothing is written afterwards."""
        self._file = file
        self._failed = failed
        self._lines: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="raylaunch-journal")
        self._thread.start()
        atexit.register(self.close)  # the journal is needed most after an unexpected end

    def write(self, line: Callable[[], str]) -> None:
        """Append a line. The thread calls `line` for its text."""
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all lines are written, and close the file."""
        self._lines.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        try:
            with self._file:
                while self._write([self._lines.get()]):
                    pass
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _write(self, lines: list[Callable[[], str] | None]) -> bool:
        """Write these lines and all others that wait, with one call. Return False after the last one."""
        with contextlib.suppress(queue.Empty):
            while lines[-1] is not None:
                lines.append(self._lines.get_nowait())
        self._file.write("".join(f"{line()}\n" for line in lines if line is not None))
        self._file.flush()
        return lines[-1] is not None
