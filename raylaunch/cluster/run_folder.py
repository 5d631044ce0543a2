"""The folder of a run, as the driver writes it. A full disk must not end the training, so only its making may fail.

It is its user's alone: folders have mode 0700 and files 0600, and what is secret is not written at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from raylaunch.cluster.scribe import Scribe
from raylaunch.core import contract, journal
from raylaunch.core.contract import LAYOUTS, Layout
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.plan import Plan
from raylaunch.core.redaction import Secrets
from raylaunch.core.result import RunResult, facts
from raylaunch.errors import ConfigError

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class RunFolder:
    """All entries are also kept in memory: the result is built from them whatever became of the disk."""

    def __init__(self, path: Path | None, layout: Layout, secrets: Secrets, warn: Callable[[str], None]) -> None:
        """`path` None: nothing is kept."""
        self.path = path
        self.entries: list[Entry] = []
        self._layout = layout
        self._secrets = secrets
        self._warn = warn
        self._events: Scribe | None = None

    @classmethod
    def create(cls, job: Job, run_id: str, warn: Callable[[str], None]) -> RunFolder:
        """Make the folder. One that is there already gets a number behind its name; no run overwrites another's."""
        layout, secrets = LAYOUTS[job.log_layout], Secrets.of(job, os.environ)
        if job.log_dir == contract.NOWHERE:
            return cls(None, layout, secrets, warn)
        name = layout.run_dir(title=job.title, run_id=run_id, random=token_hex(4))
        first = path = Path(job.log_dir).absolute() / name
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
        except OSError as error:
            blocked = next((str(above) for above in path.parents if above.is_file()), "")
            why = f"{blocked} is a file" if blocked else error.strerror
            msg = f"cannot make the run folder {path}: {why}"
            raise ConfigError(msg, hint="`log_dir` says where run folders are made") from None

    @property
    def where(self) -> str:
        """Its path; `""` where nothing is kept."""
        return "" if self.path is None else str(self.path)

    def open(self, job: Job, job_text: str, plan: Plan, began: str, clock: float) -> None:
        """Write what is known before the first event. `job_text` has no secrets in it any more."""
        if self.path is None:
            return
        self._write(contract.JOB, job_text)
        self._write(contract.PLAN, json.dumps(self._secrets.shown(asdict(plan)), indent=2) + "\n")
        try:
            self._events = Scribe(_opened(self.path / contract.EVENTS), partial(self._lament, contract.EVENTS))
        except OSError as error:
            self._lament(contract.EVENTS, error)
            return
        self._events.write(lambda: journal.header(self._secrets.shown(job), began, clock))

    def append(self, entry: Entry) -> None:
        """One step of the machine. The disk is not waited for."""
        self.entries.append(entry)
        if self._events is not None:
            self._events.write(lambda: journal.line(self._secrets.shown(entry)))

    def write_stacks(self, attempt: int, text: str) -> str:
        """What the workers of an attempt that hung were doing. Returns the file's path, `""` where nothing is kept."""
        if self.path is None:
            return ""
        path = Path(self._layout.attempt_dir(str(self.path), attempt)) / contract.STACKS
        with contextlib.suppress(OSError):  # it is there, or that the file cannot be written is said
            path.parent.mkdir(_FOLDER_MODE)
        self._write(str(path.relative_to(self.path)), self._secrets.hide(text))
        return str(path)

    def close(self, result: RunResult) -> None:
        """Write the result aside, then rename: whoever sees it sees all of it."""
        if self._events is not None:
            self._events.close()
            self._events = None
        self._write(contract.RESULT, json.dumps(self._secrets.shown(facts(result)), indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        if self.path is None:
            return
        target = self.path / name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _opened(aside) as file:
                file.write(text)
            aside.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            self._lament(name, error)

    def _lament(self, name: str, error: OSError) -> None:
        self._warn(f"cannot write {self.where}/{name}: {error.strerror}; the run goes on without it")


def _opened(path: Path) -> TextIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE), "w")
