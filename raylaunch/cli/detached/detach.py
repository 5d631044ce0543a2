"""`raylaunch -d`: starts a run whose driver is a process of the cluster, or a background process of this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from types import FrameType

from raylaunch.cli.detached import background_run
from raylaunch.cli.run_once import say
from raylaunch.cli.runs import known_runs, run_requests
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.detached.detached_run import DetachedRun, DriverNews
from raylaunch.cluster.local import local_machine, scheduler
from raylaunch.cluster.run import find_cluster
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError, ExitCode, InterruptedByUserError, signal_exit_code

_REGISTERED_SECONDS = 5.0
"""How long a driver may take to enter its run where commands look for it, which may be a slow file system."""
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedStart:
    """A run that was started and goes on, or has ended already."""

    run_id: str
    """`""`: it ended before it had one."""
    name: str
    run_dir: str
    exit_code: int | None
    """None: it goes on."""


def run(job: Job, job_text: str, *, wait: bool) -> int:
    """Start the job and return 0 when its workers have started, or its exit code if it ends before.

    `wait`: whether to wait for the workers. A signal stops the run; once there is a run, it ends only the waiting.
    """
    started = _start(job, job_text, b"", _Interrupts(), wait=wait)  # the handlers stay: this process is about to end
    if not started.run_id or started.exit_code:
        return ExitCode.OK if started.exit_code is None else started.exit_code
    print(f"{started.run_id}\n")
    for command in ("attach", "logs -f", "stop"):
        print(f"raylaunch {command} {started.name}/{started.run_id}")
    sys.stdout.flush()
    return ExitCode.OK


def start(job: Job, job_text: str, *, payload: bytes = b"", wait: bool = True) -> DetachedStart:
    """Start the job, and return when its workers have started, or it has ended. Prints what its driver says.

    `wait` False: return when it is planned. Raises ConfigError, ClusterError, RaylaunchError, and
    InterruptedByUserError when a signal has stopped the run before this process knew its id.
    """
    interrupts = _Interrupts()
    try:
        return _start(job, job_text, payload, interrupts, wait=wait)
    finally:
        interrupts.restore()


def _start(job: Job, job_text: str, payload: bytes, interrupts: _Interrupts, *, wait: bool) -> DetachedStart:
    refuse_terminal(job)
    job = scheduler.with_end(job, os.environ, say)  # only here is the scheduler's environment
    if job.run_id is None:
        job = replace(job, run_id=datetime.now().astimezone().strftime("%Y-%m-%dT%H-%M-%S"))
    starting = _StartWatch(job, interrupts, wait=wait)
    try:
        for news in _news(job, DetachedRun.of_this_process(job, job_text, payload)):
            if starting.is_done_with(news):
                interrupts.ignore()  # to disconnect takes a moment
                break
    except KeyboardInterrupt:
        if not starting.goes_on():
            raise
    finally:
        interrupts.ignore()
    if interrupts.held is not None and starting.found.exit_code is not None:
        raise interrupts.held
    return starting.found


class _StartWatch:
    """What the command knows of the run that it starts."""

    def __init__(self, job: Job, interrupts: _Interrupts, *, wait: bool) -> None:
        self.found = DetachedStart(run_id="", name=job.title, run_dir="", exit_code=None)
        self._job = job
        self._interrupts = interrupts
        self._wait = wait
        self._has_begun = False

    def is_done_with(self, news: DriverNews) -> bool:
        """Return whether the command need not wait any longer. Stops the run if a signal came before it had an id."""
        if news.begins:
            self._interrupts.hold()
            self._has_begun = True
        if news.text:
            sys.stderr.write(news.text)
            sys.stderr.flush()
        if news.run_id:
            self.found = replace(self.found, run_id=news.run_id, name=news.name, run_dir=news.run_dir)
            if self._interrupts.release() is not None and not _stop(self.found):
                return True
        if news.exit_code is not None:
            self.found = replace(self.found, exit_code=news.exit_code)
            return True
        if self._has_begun:
            self._interrupts.raise_swallowed()
        return self._interrupts.held is None and (news.runs or (bool(news.run_id) and not self._wait))

    def goes_on(self) -> bool:
        """A signal has ended the waiting. Say what becomes of the run, and return whether it is one that goes on."""
        if not self._has_begun:
            return False
        name, run_id = self.found.name, self.found.run_id or self._job.run_id
        if self._interrupts.held is None:
            say(f"{name} {run_id} goes on")
            return True
        say(f"{name} may go on for a while: `raylaunch stop --now {run_id}` ends it")
        return False


def _stop(run: DetachedStart) -> bool:
    """Stop a run that has just begun. False: that cannot be done from here, and a person is told that it goes on."""
    try:
        known = _known(run, time.monotonic() + _REGISTERED_SECONDS)
        run_requests.stop(known, Namespace(yes=True, now=True, grace="0", json=False))
    except ConfigError as error:
        say(f"{run.name} {run.run_id} goes on: {error}")
        return False
    return True


def _known(run: DetachedStart, deadline: float) -> RunReader:
    """Return the run as commands know it, as soon as its driver's thread has entered it. Raises ConfigError."""
    while True:
        try:
            known = known_runs.find(run.run_dir or run.run_id, os.environ)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        else:
            if known.entry.driver is not None or time.monotonic() > deadline:
                return known
        time.sleep(_LOOK_SECONDS)


class _Interrupts:
    """The signals that interrupt the command while it starts a run; those that the program handles or ignores are not.

    Before the run begins they raise InterruptedByUserError. From then on the first one is held until there is a run
    that can be stopped.
    """

    def __init__(self) -> None:
        """Handle them from now on, if this is the main thread."""
        #: The signal that came before there was a run, as the error that it causes.
        self.held: InterruptedByUserError | None = None
        self._is_holding = self._is_ignoring = False
        #: The error that was raised last, which code that Python calls back may have swallowed.
        self._raised: InterruptedByUserError | None = None
        is_main = threading.current_thread() is threading.main_thread()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        self._before = {
            number: handler
            for number in ((signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ())
            if (handler := signal.getsignal(number)) in defaults
        }
        self._install()

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def hold(self) -> None:
        """Hold the first signal from now on. Raises InterruptedByUserError if one has come already."""
        self._is_holding = True
        self._install()  # Ray has installed a handler of its own
        self.raise_swallowed()

    def raise_swallowed(self) -> None:
        """Raise the error of a signal again that is not on its way any more: a `__del__`, for example, had it."""
        if self._raised is not None:
            raise self._raised

    def release(self) -> InterruptedByUserError | None:
        """Return the signal that was held, and let those that come later interrupt."""
        self._is_holding = False
        return self.held

    def ignore(self) -> None:
        """Ignore signals from now on: all is done."""
        self._is_ignoring = True

    def restore(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._is_ignoring:
            return
        when = "while it started" if self._is_holding or self.held is not None else "before anything was started"
        error = InterruptedByUserError(f"stopped by {signal.Signals(number).name} {when}")
        error.exit_code = signal_exit_code(number)
        if self._is_holding and self.held is None:
            self.held = error
            say("the run is stopped as soon as its driver can be told")
            return
        self._raised = error
        raise error


def _news(job: Job, request: DetachedRun) -> Iterator[DriverNews]:
    address = find_cluster(job.ray)
    if address in (local_machine.NONE, local_machine.LOCAL):
        return background_run.start(request)
    from raylaunch.cluster.detached import driver_actor  # noqa: PLC0415, it needs Ray

    return driver_actor.start(request, background_run.drive, address)


def refuse_terminal(job: Job) -> None:
    """Raise ConfigError for a job of which a rank has the terminal, which a detached run has none of."""
    if job.debug is not None or job.pty:
        name = "pty" if job.debug is None else "debug"
        msg = f"`detach` and `{name}` exclude each other: a run in the background has no terminal"
        raise ConfigError(msg, hint="remove one of them")
