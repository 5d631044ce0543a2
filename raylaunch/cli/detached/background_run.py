"""The driver of a detached run: runs the job as a command would, but what it says goes to a file, and to who asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raylaunch.cli import run_once
from raylaunch.cluster.detached.detached_run import DetachedRun, DriverNews, Tell
from raylaunch.cluster.driver.folder_fence import take_log
from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.cluster.local.file_writer import opened
from raylaunch.core.job.job import Job
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record import run_layout
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import RaylaunchError
from raylaunch.worker import cpython_internals

if TYPE_CHECKING:
    from raylaunch.cluster.driver.succession import Succession

_PROGRAM = cpython_internals.safe_module("raylaunch.cli.detached.background_run")
"""Python's arguments for a background process of this machine."""
_MOST_EARLY = 1_000_000
"""Characters that are kept for the file until the run has a folder."""

_LAST_WORDS = " runs: "
"""In what a `Console` says when all workers were started."""


def drive(run: DetachedRun, tell: Tell, succession: Succession | None = None) -> int:
    """Run the job in this process, which was made as that which requested it, and return the exit code.

    `succession`: see `run_job`.
    """
    log = DriverLog(tell)
    if succession is not None:
        succession = replace(succession, on_command=partial(log.take_over, epoch=succession.epoch))
    progress = "off" if run.job.progress == "off" else "line"
    job = replace(run.job, detach=False, keep_warm=0.0, show="none", tee=0, progress=progress)

    def observe(observer: RunObserver) -> RunObserver:
        last = succession.predecessor if succession is not None else None
        runs = last is not None and last.ledger.decisions.run.phase.is_training
        return _StartObserver(observer, log, tell, runs=runs)

    def run_it() -> int:
        return run_once.run(job, run.job_text, payload=run.payload, observe=observe, succession=succession)

    with contextlib.closing(log), contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return run_once.exit_code_of(run_it)


class DriverLog(io.TextIOBase):
    """A stream whose lines go to `driver.log` in the run folder, once there is one, and to the command."""

    def __init__(self, tell: Tell) -> None:
        """`tell` takes the news with these lines."""
        self._tell = tell
        self._early: list[str] = []
        self._early_size = 0
        self._fd = -1
        self._is_told = True
        self._is_last_awaited = False
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding in which lines go to `driver.log`: UTF-8, whatever the locale is."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True, as for every stream that is written to (io.IOBase)."""
        return True

    def write(self, text: str) -> int:
        """Write to the file, as far as that is possible, and tell the command."""
        with self._lock:
            if self._fd >= 0:
                self._put(text)
            elif self._early_size < _MOST_EARLY:
                self._early.append(text)
                self._early_size += len(text)
        if self._is_told:
            self._tell(DriverNews(text=text))
        if self._is_last_awaited and _LAST_WORDS in text:
            self._is_told = self._is_last_awaited = False
            self._tell(DriverNews(runs=True))
        return len(text)

    def go_to(self, run_dir: str) -> None:
        """Write to this folder from now on; `""`: nothing is kept."""
        self._begin(run_dir, opened)

    def take_over(self, run_dir: str, epoch: int) -> None:
        """Write to this folder from now on, into which an earlier driver has written. Waits for no file system."""
        args = (run_dir, partial(take_log, epoch=epoch))
        threading.Thread(target=self._begin, args=args, daemon=True, name="raylaunch-log").start()

    def _begin(self, run_dir: str, open_log: Callable[[Path], int]) -> None:
        """Write what there is so far to the file, if there is to be one and it can be opened."""
        fd = -1
        if run_dir:
            with contextlib.suppress(OSError, ValueError):
                fd = open_log(Path(run_dir) / run_layout.DRIVER_LOG)
        with self._lock:
            self._fd, self._early_size = fd, _MOST_EARLY
            self._put("".join(self._early))
            self._early = []

    def _put(self, text: str) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, text.encode(errors="backslashreplace"))

    def workers_run(self) -> None:
        """Tell the command that the workers run, as soon as the line that says so is written, and nothing more."""
        self._is_last_awaited = True

    def run_already(self) -> None:
        """Tell the command that the workers run, which an earlier driver has said, and nothing more."""
        self._is_told = False
        self._tell(DriverNews(runs=True))

    def close(self) -> None:
        """Close `driver.log`, as the run has ended."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


class _StartObserver:
    """Passes everything on to another observer; tells the command of the plan, and of the start of the workers."""

    def __init__(self, observer: RunObserver, log: DriverLog, tell: Tell, *, runs: bool) -> None:
        """`runs`: whether the workers run already, since an earlier driver has started them."""
        self._observer = observer
        self._log = log
        self._tell = tell
        self._has_run = runs
        #: What the command is told of the run as soon as commands find it; None: nothing, or it was told.
        self._planned: DriverNews | None = None
        self.on_output = observer.on_output
        self.on_progress = observer.on_progress
        self.on_message = observer.on_message

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The run has a folder."""
        self._log.go_to(run_dir)
        run_id = os.path.basename(run_dir) or job.run_id or ""
        self._observer.on_plan(job, plan, run_dir)
        self._planned = DriverNews(run_id=run_id, name=job.title, run_dir=run_dir)

    def on_takeover(self, job: Job, run_dir: str) -> None:
        """The run has a folder, of which the command may not have heard."""
        self._observer.on_takeover(job, run_dir)
        self._tell(DriverNews(run_id=os.path.basename(run_dir) or job.run_id or "", name=job.title, run_dir=run_dir))
        if self._has_run:
            self._log.run_already()

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """The machine has handled an event. Before the first one, the run was entered in the registry."""
        if self._planned is not None:
            self._tell(self._planned)
            self._planned = None
        if machine.phase is Phase.RUNNING and not self._has_run:
            self._has_run = True
            self._log.workers_run()  # first: what the observer says is written in another thread
        self._observer.on_entry(entry, machine)


# Without a cluster: in a background process of this machine.


def start(run: DetachedRun) -> Iterator[DriverNews]:
    """Start the process, in a session of its own, and yield its news; it goes on when nobody asks for more.

    Raises RaylaunchError if it ends without telling how, and OSError.
    """
    yield DriverNews(begins=True)
    readable, writable = os.pipe()
    with open(readable, "rb") as news:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *cpython_internals.interpreter_options(), *_PROGRAM, str(writable)],
            pass_fds=[writable],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(writable)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            pickle.dump(run, process.stdin)
        for line in news:
            found = DriverNews(**json.loads(line))
            yield found
            if found.exit_code is not None:
                process.wait()
                return
        if process.wait() is not None:
            msg = f"the driver of the run ended with exit code {process.returncode} and has not told why"
            raise RaylaunchError(msg)


def main(descriptor: str) -> int:
    """Be the driver of the run that is on stdin. `descriptor`: the pipe for its news."""
    run = pickle.load(sys.stdin.buffer)  # noqa: S301, of the process that started this one
    pipe = int(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(pipe, False)

    def tell(news: DriverNews) -> None:
        with contextlib.suppress(OSError):  # the command has heard enough
            os.write(pipe, json.dumps(asdict(news)).encode() + b"\n")

    code = drive(run, tell)
    tell(DriverNews(exit_code=code))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
