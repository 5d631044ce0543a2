"""The folder of a run, as the driver writes it. A full disk must not end the training, so only its making may fail."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from raylaunch.core import contract, journal
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.plan import Plan
from raylaunch.core.result import RunResult, facts
from raylaunch.errors import ConfigError


class RunFolder:
    """All entries are also kept in memory: the result is built from them whatever became of the disk."""

    def __init__(self, path: Path | None, warn: Callable[[str], None]) -> None:
        """`path` None: nothing is kept."""
        self.path = path
        self.entries: list[Entry] = []
        self._warn = warn
        self._events: TextIO | None = None

    @classmethod
    def create(cls, job: Job, run_id: str, warn: Callable[[str], None]) -> RunFolder:
        """Make the folder. One that is there already gets a number behind its name; no run overwrites another's."""
        if job.log_dir == contract.NOWHERE:
            return cls(None, warn)
        layout = contract.LAYOUTS[job.log_layout]
        name = layout.run_dir(title=job.title, run_id=run_id, random=secrets.token_hex(4))
        first = path = Path(job.log_dir).absolute() / name
        number = 1
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir()
                    return cls(path, warn)
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

    def open(self, job: Job, job_text: str, plan: Plan, began: str) -> None:
        """Write what is known before the first event."""
        if self.path is None:
            return
        self._write(contract.JOB, job_text)
        self._write(contract.PLAN, json.dumps(asdict(plan), indent=2) + "\n")
        try:
            self._events = (self.path / contract.EVENTS).open("w")
        except OSError as error:
            self._lament(contract.EVENTS, error)
        self._line(journal.header(job, began))

    def append(self, entry: Entry) -> None:
        """One step of the machine."""
        self.entries.append(entry)
        self._line(journal.line(entry))

    def close(self, result: RunResult) -> None:
        """Write the result aside, then rename: whoever sees it sees all of it."""
        if self._events is not None:
            self._events.close()
            self._events = None
        self._write(contract.RESULT, json.dumps(facts(result), indent=2) + "\n")

    def _line(self, text: str) -> None:
        if self._events is None:
            return
        try:
            self._events.write(text + "\n")
            self._events.flush()
        except OSError as error:
            self._events = None
            self._lament(contract.EVENTS, error)

    def _write(self, name: str, text: str) -> None:
        if self.path is None:
            return
        aside = self.path / f".{name}.{os.getpid()}"
        try:
            aside.write_text(text)
            aside.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            self._lament(name, error)

    def _lament(self, name: str, error: OSError) -> None:
        self._warn(f"cannot write {self.where}/{name}: {error.strerror}; the run goes on without it")
