"""The command `raylaunch stop`: asks the driver to end the run, and waits until it has ended.

A driver of this machine that cannot be asked gets the signal that a person would send.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone

from raylaunch.cli.run_once import say
from raylaunch.cli.runs import known_runs
from raylaunch.cli.runs.known_runs import KnownRun
from raylaunch.cli.runs.live_reader import LiveReader
from raylaunch.cli.runs.run_summary import LOST, RunSummary, summary
from raylaunch.cluster.control.control_client import ControlError, RefusedError
from raylaunch.cluster.control.control_messages import StopRun
from raylaunch.cluster.driver.run_registry import DriverProcess
from raylaunch.core.machine.state import Phase
from raylaunch.core.text import count, printable
from raylaunch.errors import ConfigError, ExitCode

_POLL_SECONDS = 0.1
_WAIT_SECONDS = 5.0
_NOTICE_SECONDS = 3.0
"""Time for the driver to record the first signal; another one before that could be lost, as the kernel merges them."""


def stop(run: KnownRun, arguments: Namespace, environ: Mapping[str, str]) -> int:
    """Stop a run and return 0 when it has ended. Raises ConfigError if nobody here can."""
    shown = _summary(run)
    if shown.is_over or known_runs.has_ended(run, environ):
        say(f"{run.title} has ended already: {_outcome(shown)}")
        return ExitCode.OK
    live = _live_reader(run)
    number = None if live is not None else _signal(run)
    if not arguments.yes and sys.stdin is not None and sys.stdin.isatty() and not _is_confirmed(shown):
        say("nothing was stopped")
        return ExitCode.INTERRUPTED
    try:
        if live is not None:
            return _request(replace(run, reader=live), live, at_once=arguments.now)
        assert run.driver is not None, "it gets a signal"
        assert number is not None, "it gets a signal"
        return _stop(run, run.driver, number, environ, at_once=arguments.now)
    except KeyboardInterrupt:
        say(f"{run.title} is still ending; `raylaunch stop --now {run.id}` does not wait for its workers")
        return ExitCode.INTERRUPTED


def _live_reader(run: KnownRun) -> LiveReader | None:
    """Return what can ask the driver; None: a signal must do. Raises ConfigError if neither is possible."""
    if run.control is None:
        return None
    live = LiveReader(run.control, run.folder)
    live.refresh()
    if not live.is_asked and not (run.driver is not None and run.driver.is_here):
        msg = f"{run.title} cannot be stopped from here: {live.problem or 'its driver cannot be asked'}"
        raise ConfigError(msg, hint="use a shell on the machine of its driver")
    live.close()  # the person may take long to confirm
    return live if live.is_asked else None


def _signal(run: KnownRun) -> signal.Signals:
    """Return the signal that ends a run. Raises ConfigError."""
    driver = run.driver
    if driver is None or not driver.is_here:
        where = f"it runs on {driver.host}" if driver is not None else "the registry does not have it"
        raise ConfigError(f"{run.title} cannot be stopped from here: {where}", hint="use a shell where it was started")
    name = next((name for name in ("SIGTERM", *run.signals) if name in run.signals), "")
    if not name:
        msg = f"{run.title} ends at no signal (`signals_to_handle`, or a thread of a program runs it)"
        raise ConfigError(msg, hint=f"`kill -9 {driver.pid}` ends it at once, and its workers with it")
    return signal.Signals[name]


def _request(run: KnownRun, live: LiveReader, *, at_once: bool) -> int:
    """Ask the driver to end the run, and wait until it has ended."""
    try:
        list(live.client.ask(StopRun(at_once=at_once)))
    except RefusedError as error:
        raise ConfigError(f"{run.title} is not stopped: {error}", hint=error.hint) from None
    except ControlError:
        pass  # it has just ended
    where = f" (process {run.driver.pid} on {run.driver.host})" if run.driver is not None else ""
    say(f"the driver of {run.title} was told to stop{where}")
    while not live.result() and live.is_asked:
        live.wait(_WAIT_SECONDS)
    say(f"{run.title}: {_outcome(_summary(run))}")
    return ExitCode.OK


def _is_confirmed(shown: RunSummary) -> bool:
    size = f" ({count(shown.workers, 'worker')} on {count(shown.nodes, 'node')})" if shown.workers else ""
    print(printable(f"stop {shown.name} {shown.id}{size}? [y/N] "), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _stop(
    run: KnownRun, driver: DriverProcess, number: signal.Signals, environ: Mapping[str, str], *, at_once: bool
) -> int:
    if _send(driver, number):
        say(f"{number.name} was sent to the driver of {run.title} (process {driver.pid})")
    deadline = time.monotonic() + _NOTICE_SECONDS
    while not known_runs.has_ended(run, environ):
        is_noticed = _summary(run).state in (Phase.STOPPING, Phase.DONE) or time.monotonic() > deadline
        if at_once and is_noticed:
            at_once = False
            _send(driver, number)
        time.sleep(_POLL_SECONDS)
    say(f"{run.title}: {_outcome(_summary(run)) if run.folder else 'it has ended'}")
    return ExitCode.OK


def _send(driver: DriverProcess, number: signal.Signals) -> bool:
    """Send a signal to the driver and to no other process that may have its pid now. Raises ConfigError."""
    try:
        fd = os.pidfd_open(driver.pid)
    except OSError:  # it is gone
        return False
    try:
        if not driver.is_alive:
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise ConfigError(f"process {driver.pid} belongs to another user", hint="its owner can stop it") from None
    finally:
        os.close(fd)
    return True


def _summary(run: KnownRun) -> RunSummary:
    return summary(run, datetime.now(timezone.utc))


def _outcome(shown: RunSummary) -> str:
    if shown.state == LOST:
        return f"lost; {shown.why}"
    return f"{shown.state} with exit code {shown.exit_code}: {shown.why}"
