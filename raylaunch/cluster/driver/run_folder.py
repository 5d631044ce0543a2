"""The run folder: job, plan, journal, stacks and result, as the driver writes them.

A full disk must not end the training, so only `RunFolder.create` raises errors. A file system that does not answer must
not stop it either, so all files are written in a thread. Only the user may read the folder: folders have mode 0700 and
files 0600. Secrets are never written.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from raylaunch.cluster.driver.folder_fence import FolderFence
from raylaunch.cluster.driver.observer import described
from raylaunch.cluster.local.file_writer import FileWriter, open_private
from raylaunch.core.history.run_status import RunStatus, StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.state import Phase
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.result import ResultBuilder, RunResult, facts
from raylaunch.core.record.run_layout import LAYOUTS, RunLayout
from raylaunch.core.text import printable
from raylaunch.errors import ConfigError
from raylaunch.node.linux import working_folder
from raylaunch.worker.path_owners import refuse_strangers
from raylaunch.worker.runtime.process_setup import encodable

_FOLDER_MODE = 0o700
_PACKAGES = ("raylaunch", "torch", "ray", "omegaconf")
_FENCE_SECONDS = 1.0
_MOST_LAST = 64
MOST_WAITING = 20_000
"""Most entries of the journal that wait for the file system. With more, it ends: they would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderState:
    """A run folder as one driver leaves it to the next."""

    path: str
    began: str
    status: StatusBuilder
    count: int = 0
    """How many entries the journal has got."""
    last: list[JournalEntry] = field(default_factory=list)
    """The last of them, which may not be on the disk."""


class RecordedRun:
    """What the entries of the journal say of the run so far, in memory: it needs no disk.

    Only the driver's thread may use it, but any thread may call `status`.
    """

    def __init__(self, state: FolderState, secrets: Redactor) -> None:
        self._path, self._began = state.path, state.began
        self._builder = state.status
        self._lock = threading.Lock()
        self._shown: RunStatus | None = None  # without secrets, until the next entry
        self._secrets = secrets
        self.count = state.count  # see `FolderState`
        self._last = deque(state.last, maxlen=_MOST_LAST)

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        self.count += 1
        self._last.append(entry)
        with self._lock:
            self._builder.add(entry)
            self._shown = None

    @property
    def result(self) -> ResultBuilder:
        """What the result is made of."""
        return self._builder.results

    def status(self) -> RunStatus:
        """Return the status of the run, without secrets."""
        with self._lock:
            if self._shown is None:
                status = self._builder.status(run_dir=self._path, began=self._began)
                self._shown = self._secrets.shown(status)
            return self._shown

    def state(self) -> FolderState:
        """Return what the next driver needs to go on with the folder."""
        return FolderState(
            path=self._path, began=self._began, status=self._builder, count=self.count, last=[*self._last]
        )


class JournalFile:
    """The file of the journal, without secrets. After an error, of which it warns, nothing more is written to it.

    Only the thread of its `writer` may use it.
    """

    def __init__(self, folder: Path, fence: FolderFence, secrets: Redactor, warn: Callable[[str], None]) -> None:
        self.writer = FileWriter()
        self._folder = folder
        self._fence = fence
        self._fence_check_at = 0.0
        self._secrets = secrets
        self._warn = warn
        self._file: TextIO | None = None

    def open(self, job: Job, began: str, clock: float) -> None:
        """Begin a new journal with its first line, of these facts: see `JournalHeader`."""
        try:
            self._file = open_private(self._folder / run_layout.EVENTS)
        except OSError as error:
            self.close(error)
        self._write(lambda: self._header(job, began, clock))

    def take_over(self, state: FolderState, job: Job) -> bool:
        """Go on with the journal of the last driver, and return whether that is possible.

        It may have written what it could not decide any more: the state has what it decided last.
        """
        last = [journal.line(self._secrets.shown(entry)) for entry in state.last]
        try:
            header = self._header(job, state.began, 0.0)
            self._file, missing = self._fence.take_journal(header, state.count - len(last), last)
        except (OSError, ValueError) as error:
            self.close(error)
            return False
        if missing:
            self._warn(f"{self._folder} is not the last driver's folder: {missing} entries of the journal are missing")
        return True

    def write(self, entry: JournalEntry) -> None:
        """Append an entry."""
        self._write(lambda: journal.line(self._secrets.shown(entry)))

    def _header(self, job: Job, began: str, clock: float) -> str:
        return journal.header(self._secrets.shown(job), began, clock, _versions(), epoch=self._fence.epoch)

    def _write(self, line: Callable[[], str]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(f"{line()}\n")
            if not self.writer.waiting:
                self._file.flush()
                self._check_fence()
        except Exception as error:  # noqa: BLE001
            self.close(error)

    def _check_fence(self) -> None:
        """End this process, at most a second after another driver has taken over, if it decides something then."""
        if time.monotonic() >= self._fence_check_at:
            self._fence_check_at = time.monotonic() + _FENCE_SECONDS
            self._fence.check()

    def close(self, error: Exception | None = None) -> None:
        """Close the file. `error`: something could not be written."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as last:
            error = error or last
        if error is not None:
            self._warn(_failure(self._folder / run_layout.EVENTS, error))


class RunFolder:
    """The folder of one run."""

    def __init__(
        self, path: Path | None, layout: RunLayout, secrets: Redactor, warn: Callable[[str], None], epoch: int = 0
    ) -> None:
        """`path` None: nothing is written. `warn` takes a line for a person.

        `epoch`: the driver's epoch, if another driver may take the folder over; else 0.
        """
        self.path = path
        self.fence = FolderFence(path if epoch else None, epoch or 1)
        #: Set when an agent obeys this driver; until then nothing is written.
        self._commands = threading.Event()
        self._layout = layout
        self._secrets = secrets
        self._warn = warn
        #: None: nothing is written, or nothing any more.
        self._journal = JournalFile(path, self.fence, secrets, warn) if path is not None else None
        self._has_given_up = False
        self.recorded = RecordedRun(FolderState(path=self.where, began="", status=StatusBuilder(Job())), secrets)

    @classmethod
    def create(cls, job: Job, run_id: str, warn: Callable[[str], None], epoch: int = 0) -> RunFolder:
        """Make a new folder, with a number added to its name if that is taken. Raises ConfigError.

        Waits for the file system, but a signal interrupts that. `epoch`: see the constructor.
        """
        layout, secrets = LAYOUTS[job.log_layout], Redactor.of(job, os.environ)
        if job.log_dir == run_layout.NOWHERE:
            return cls(None, layout, secrets, warn, epoch)
        name = layout.run_dir(title=job.title, run_id=run_id, random=token_hex(4))
        log_dir = Path(encodable(str(Path(working_folder.current(), job.log_dir))))
        first = Path(encodable(str(log_dir / name)))
        made: list[Path | OSError | ValueError] = []
        thread = threading.Thread(
            target=lambda: made.append(_made(log_dir, first)), daemon=True, name="raylaunch-run-folder"
        )
        thread.start()
        thread.join()
        (path,) = made
        if isinstance(path, Path):
            return cls(path, layout, secrets, warn, epoch)
        blocked = ""
        if isinstance(path, (FileExistsError, NotADirectoryError)):
            blocked = next((str(above) for above in first.parents if above.is_file()), "")
        why = f"{blocked} is a file" if blocked else getattr(path, "strerror", None) or str(path)
        msg = f"cannot make the run folder {first}: {why}"
        raise ConfigError(msg, hint="`log_dir` says where run folders are made")

    @property
    def where(self) -> str:
        """The path; `""` if nothing is written."""
        return "" if self.path is None else str(self.path)

    def resume(self, state: FolderState, job: Job) -> None:
        """Go on with the folder of another driver, as soon as `take_command` is called."""
        self.recorded = RecordedRun(state, self._secrets)
        if (file := self._journal) is not None:
            file.writer.put(lambda: self._take_over(file, state, job))

    def take_command(self) -> None:
        """Write into the folder of another driver from now on, which no longer can: agents obey this one."""
        self._commands.set()

    def _take_over(self, file: JournalFile, state: FolderState, job: Job) -> None:
        self._commands.wait()
        if file.take_over(state, job) and self.recorded.status().phase is not Phase.DONE:
            self.fence.remove(run_layout.RESULT, run_layout.REPORT)

    def open(self, job: Job, job_text: str, plan: Plan, began: str, clock: float) -> None:
        """Write what is known before the first event. `job_text` has no secrets. `clock`: see `journal.header`."""
        state = FolderState(path=self.where, began=began, status=StatusBuilder(job))
        self.recorded = RecordedRun(state, self._secrets)
        if (file := self._journal) is None:
            return
        file.writer.put(self._link_latest)
        file.writer.put(lambda: self._write(run_layout.JOB, lambda: job_text))
        file.writer.put(lambda: self._write(run_layout.PLAN, lambda: _json(self._secrets.shown(asdict(plan)))))
        file.writer.put(lambda: file.open(job, began, clock))

    def _link_latest(self) -> None:
        """Let the link `latest` beside the folder lead to it, if the file system has links: nothing needs this one."""
        if self.path is None or not self._layout.has_latest:
            return
        aside = self.path.with_name(f".{run_layout.LATEST}.{token_hex(4)}")
        try:
            aside.symlink_to(self.path.name)
            aside.replace(self.path.with_name(run_layout.LATEST))
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                aside.unlink()

    def append(self, entry: JournalEntry) -> None:
        """Append a step of the machine to the journal, without waiting for the disk."""
        self.recorded.add(entry)
        if (file := self._journal) is None or self._has_given_up:
            return
        if file.writer.waiting >= MOST_WAITING:
            self._has_given_up = True
            file.writer.put(file.close)
            error = OSError(errno.ETIMEDOUT, "the file system does not answer")
            self._warn(_failure(Path(self.where, run_layout.EVENTS), error))
            return
        file.writer.put(lambda: file.write(entry))

    def write_stacks(self, attempt: int, text: str) -> str:
        """Write the stacks of an attempt that hung. Return the file's path; `""` if nothing is written."""
        if self.path is None or self._journal is None:
            return ""
        path = Path(self._layout.attempt_dir(str(self.path), attempt)) / run_layout.STACKS
        name = str(path.relative_to(self.path))
        self._journal.writer.put(
            lambda: self._write(name, lambda: printable(self._secrets.hide(text), several_lines=True))
        )
        return str(path)

    def close(self, result: RunResult, conclude: Callable[[RunResult], None] | None = None) -> None:
        """Write the result and close the journal. The result appears whole, by a rename, after all other files.

        Waits until all is written, but gives up, with a warning, if the file system does not answer for seconds.
        `conclude` is called between, unless the file system does not answer.
        """
        if (file := self._journal) is None:
            return
        file.writer.put(file.close)
        file.writer.put(self.fence.check)
        if file.writer.drain() and conclude is not None:
            conclude(result)
        file.writer.put(lambda: self._write(run_layout.RESULT, lambda: _json(self._secrets.shown(facts(result)))))
        if not file.writer.close():
            self._warn(f"the file system of {self.where} does not answer: what was written last is missing there")
        self._journal = None

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.path is None:
            return
        target = self.path / name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with contextlib.suppress(FileExistsError):
                target.parent.mkdir(_FOLDER_MODE)
            with open_private(aside) as file:
                file.write(text())
            self.fence.check()
            aside.replace(target)
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(OSError):
                aside.unlink()
            self._warn(_failure(target, error))


def _failure(file: Path, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else f"{described(error)} (this is a bug in raylaunch)"
    return f"cannot write {file}: {why}; the run goes on without it"


def _versions() -> dict[str, str]:
    """Return the versions of raylaunch and what it needs on this machine, as far as they are known."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    kernel = os.uname()
    return {
        **found,
        "python": platform.python_version(),
        "kernel": f"{kernel.sysname} {kernel.release} {kernel.machine}",
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _made(log_dir: Path, first: Path) -> Path | OSError | ValueError:
    """Make the folder `first`, or one with a number added to its name, and return it; or return what went wrong.

    A `log_dir` that is new gets a file with which Git leaves it out, and so does Ray when it copies a working folder.
    """
    path, number = first, 1
    try:
        if not log_dir.exists():
            log_dir.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError), (log_dir / ".gitignore").open("x") as file:
                file.write("# Made by raylaunch.\n*\n")
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir(_FOLDER_MODE)
                break
            except FileExistsError:
                number += 1
                path = first.with_name(f"{first.name}-{number}")
        try:
            # On NFS, what root makes may belong to somebody else, as this new folder shows.
            refuse_strangers(str(path), [path.lstat().st_uid])
        except PermissionError:
            path.rmdir()
            raise
    except (OSError, ValueError) as error:  # ValueError: no path has a NUL, or half a surrogate pair
        return error
    return path
