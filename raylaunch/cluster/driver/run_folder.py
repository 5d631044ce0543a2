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
from dataclasses import asdict, dataclass
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
    count: int
    """How many entries the journal has got."""
    last: list[JournalEntry]
    """The last of them, which may not be on the disk."""


class RunFolder:
    """The folder of one run. The result is also computed in memory, so that it needs no disk."""

    def __init__(
        self, path: Path | None, layout: RunLayout, secrets: Redactor, warn: Callable[[str], None], epoch: int = 0
    ) -> None:
        """`path` None: nothing is written. `warn` takes a line for a person.

        `epoch`: the driver's epoch, if another driver may take the folder over; else 0.
        """
        self.path = path
        self.fence = FolderFence(path if epoch else None, epoch)
        self._epoch = epoch or 1
        #: Set when an agent obeys this driver; until then nothing is written.
        self._commands = threading.Event()
        self._fence_check_at = 0.0
        self._status = StatusBuilder(Job())
        self._status_lock = threading.Lock()
        self._shown_status: RunStatus | None = None  # without secrets, until the next entry
        self._began = ""
        self._layout = layout
        self._secrets = secrets
        self._warn = warn
        self._writer = FileWriter() if path is not None else None
        #: The journal. Only the writer's thread uses it.
        self._events: TextIO | None = None
        self._has_given_up = False
        self.count = 0  # see `FolderState`
        self._last: deque[JournalEntry] = deque(maxlen=_MOST_LAST)

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

    @property
    def result(self) -> ResultBuilder:
        """What the result is made of. Only the driver's thread may use it."""
        return self._status.results

    def status(self) -> RunStatus:
        """Return the status of the run, without secrets. Any thread may call this."""
        with self._status_lock:
            if self._shown_status is None:
                status = self._status.status(run_dir=self.where, began=self._began)
                self._shown_status = self._secrets.shown(status)
            return self._shown_status

    def state(self) -> FolderState:
        """Return what the driver needs that goes on with this folder."""
        return FolderState(
            path=self.where, began=self._began, status=self._status, count=self.count, last=[*self._last]
        )

    def resume(self, state: FolderState, job: Job) -> None:
        """Go on with the folder of another driver, as soon as `take_command` is called."""
        self._status, self._began, self.count = state.status, state.began, state.count
        self._last.extend(state.last)
        if self._writer is not None:
            header = journal.header(self._secrets.shown(job), state.began, 0.0, _versions(), epoch=self._epoch)
            self._writer.put(lambda: self._take_journal(state, header))

    def take_command(self) -> None:
        """Write into the folder of another driver from now on, which no longer can: agents obey this one."""
        self._commands.set()

    def _take_journal(self, state: FolderState, header: str) -> None:
        """The last driver may have written what it could not decide any more: the state has what it decided last."""
        self._commands.wait()
        last = [journal.line(self._secrets.shown(entry)) for entry in state.last]
        try:
            self._events, missing = self.fence.take_journal(header, state.count - len(last), last)
            if missing:
                self._warn(
                    f"{self.where} is not the last driver's folder: {missing} entries of the journal are missing"
                )
            if self.status().phase is not Phase.DONE:
                self.fence.remove(run_layout.RESULT, run_layout.REPORT)
        except (OSError, ValueError) as error:
            self._close_journal(error)

    def open(self, job: Job, job_text: str, plan: Plan, began: str, clock: float) -> None:
        """Write what is known before the first event. `job_text` has no secrets. `clock`: see `journal.header`."""
        self._status, self._began = StatusBuilder(job), began
        if self._writer is None:
            return
        self._writer.put(self._link_latest)
        self._writer.put(lambda: self._write(run_layout.JOB, lambda: job_text))
        self._writer.put(lambda: self._write(run_layout.PLAN, lambda: _json(self._secrets.shown(asdict(plan)))))
        self._writer.put(
            lambda: self._open_journal(
                lambda: journal.header(self._secrets.shown(job), began, clock, _versions(), epoch=self._epoch)
            )
        )

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

    def _open_journal(self, header: Callable[[], str]) -> None:
        assert self.path is not None
        try:
            self._events = open_private(self.path / run_layout.EVENTS)
        except OSError as error:
            self._warn_of(run_layout.EVENTS, error)
        self._write_line(header)

    def append(self, entry: JournalEntry) -> None:
        """Append a step of the machine to the journal, without waiting for the disk."""
        self.count += 1
        self._last.append(entry)
        with self._status_lock:
            self._status.add(entry)
            self._shown_status = None
        if self._writer is None or self._has_given_up:
            return
        if self._writer.waiting >= MOST_WAITING:
            self._has_given_up = True
            self._writer.put(self._close_journal)
            self._warn_of(run_layout.EVENTS, OSError(errno.ETIMEDOUT, "the file system does not answer"))
            return
        self._writer.put(lambda: self._write_line(lambda: journal.line(self._secrets.shown(entry))))

    def _write_line(self, line: Callable[[], str]) -> None:
        """Append a line to the journal; after an error nothing more is written to it."""
        if self._events is None:
            return
        try:
            self._events.write(f"{line()}\n")
            if self._writer is not None and not self._writer.waiting:
                self._events.flush()
                self._check_fence()
        except Exception as error:  # noqa: BLE001
            self._close_journal(error)

    def _check_fence(self) -> None:
        """End this process, at most a second after another driver has taken over, if it decides something then."""
        if time.monotonic() >= self._fence_check_at:
            self._fence_check_at = time.monotonic() + _FENCE_SECONDS
            self.fence.check()

    def _close_journal(self, error: Exception | None = None) -> None:
        """Close the journal. `error`: a line could not be written."""
        events, self._events = self._events, None
        try:
            if events is not None:
                events.close()
        except OSError as last:
            error = error or last
        if error is not None:
            self._warn_of(run_layout.EVENTS, error)

    def write_stacks(self, attempt: int, text: str) -> str:
        """Write the stacks of an attempt that hung. Return the file's path; `""` if nothing is written."""
        if self.path is None or self._writer is None:
            return ""
        path = Path(self._layout.attempt_dir(str(self.path), attempt)) / run_layout.STACKS
        name = str(path.relative_to(self.path))
        self._writer.put(lambda: self._write(name, lambda: printable(self._secrets.hide(text), several_lines=True)))
        return str(path)

    def close(self, result: RunResult, conclude: Callable[[RunResult], None] | None = None) -> None:
        """Write the result and close the journal. The result appears whole, by a rename, after all other files.

        Waits until all is written, but gives up, with a warning, if the file system does not answer for seconds.
        `conclude` is called between, unless the file system does not answer.
        """
        if self._writer is None:
            return
        self._writer.put(self._close_journal)
        self._writer.put(self.fence.check)
        if self._writer.drain() and conclude is not None:
            conclude(result)
        self._writer.put(lambda: self._write(run_layout.RESULT, lambda: _json(self._secrets.shown(facts(result)))))
        if not self._writer.close():
            self._warn(f"the file system of {self.where} does not answer: what was written last is missing there")
        self._writer = None

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
            self._warn_of(name, error)

    def _warn_of(self, name: str, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else f"{described(error)} (this is a bug in raylaunch)"
        self._warn(f"cannot write {self.where}/{name}: {why}; the run goes on without it")


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
