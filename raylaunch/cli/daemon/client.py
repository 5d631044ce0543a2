"""The client of the daemon: find or start a daemon, send it the run, and forward signals until the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from raylaunch.cli.daemon import daemon_messages, fingerprint, socket_dir
from raylaunch.cli.daemon.daemon_messages import DaemonState, RunEnded, RunRequest, SignalForwarded
from raylaunch.cli.daemon.socket_dir import NoDaemonError
from raylaunch.cli.run_once import say
from raylaunch.cluster.driver import signals
from raylaunch.cluster.session import discovery
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.newtypes import SignalName
from raylaunch.errors import InterruptedByUserError, RaylaunchError, signal_exit_code
from raylaunch.node.protocol import wire
from raylaunch.worker import cpython_internals

MAX_DAEMONS = 4
"""Daemons of one user on one machine."""
_TIMEOUT_SECONDS = 5.0
PROGRAM = cpython_internals.safe_module("raylaunch.cli.daemon.daemon")
"""Python's arguments for the daemon."""


def run(job: Job, job_text: str) -> int | None:
    """Run the job in a daemon and return its exit code; None, after a message, if no daemon can run it."""
    why = "the daemon exited before the run started"
    try:
        _check_usable(job, os.environ)
        directory = socket_dir.folder(os.environ)
        key = fingerprint.key(os.environ)
        request = _run_request(job, job_text)
        for connection in connections(directory, key):
            if (code := _follow_run(connection, job, request)) is not None:
                return code
    except (NoDaemonError, OSError) as error:
        why = str(error)
    except (RaylaunchError, InterruptedByUserError):  # the daemon died during the run
        socket_dir.sweep(directory)
        raise
    say(f"keep_warm has no effect: {why}")
    return None


def _check_usable(job: Job, environ: Mapping[str, str]) -> None:
    """Raise NoDaemonError if a daemon would be useless, or could not do what this process does."""
    if discovery.is_alone(job.ray, environ):
        msg = "it works on a Ray cluster only, and this run uses none"
        raise NoDaemonError(msg)
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ:  # set by `ray job submit` for its entry points
        msg = "Ray ends all processes of a submitted job"
        raise NoDaemonError(msg)
    if threading.current_thread() is not threading.main_thread():
        msg = "only the main thread receives signals, and this is another thread"
        raise NoDaemonError(msg)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if streams != (sys.__stdin__, sys.__stdout__, sys.__stderr__) or None in streams:
        msg = "stdin, stdout or stderr is closed or replaced"
        raise NoDaemonError(msg)


def _run_request(job: Job, job_text: str) -> RunRequest:
    umask = os.umask(0)
    os.umask(umask)
    names = [*job.signals_to_handle, *job.signals_to_forward]
    return RunRequest(
        job=job,
        job_text=job_text,
        title=Redactor.of(job, os.environ).headline(job),
        cwd=os.getcwd(),
        environ=dict(os.environ),
        umask=umask,
        ignored=tuple(SignalName(name) for name in names if _is_ignored(name)),
    )


def _is_ignored(name: str) -> bool:
    return name in signal.Signals.__members__ and signal.getsignal(signal.Signals[name]) is signal.SIG_IGN


# Find or start a daemon.


def connections(directory: Path, key: str) -> Iterator[socket.socket]:
    """Yield connections to free daemons with this fingerprint, each reserved for this process; finally to a new one.

    Busy daemons are skipped: their run may last, and another command may be next.
    """
    for path in socket_dir.sockets(directory, key):
        connection = socket_dir.connect(path, _TIMEOUT_SECONDS)
        if connection is None:
            continue
        with contextlib.suppress(OSError):
            wire.send(connection, daemon_messages.ACQUIRE)
        if daemon_messages.receive(connection) == daemon_messages.FREE:
            connection.settimeout(None)
            yield connection
        connection.close()
    yield start_daemon(directory, key)


def start_daemon(directory: Path, key: str) -> socket.socket:
    """Start a daemon, which outlives this process, and return the connection to it."""
    import subprocess  # noqa: PLC0415

    make_room(directory)
    ours, theirs = wire.pair()
    with theirs:
        subprocess.Popen(  # noqa: S603
            [
                *(sys.executable, *cpython_internals.interpreter_options()),
                *(*PROGRAM, str(directory), key, str(theirs.fileno())),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # stderr is this process's, for errors until the first run starts
            cwd="/",
            start_new_session=True,
        ).returncode = 0  # no ResourceWarning: it outlives this process, so nothing waits for it
    return ours


def make_room(directory: Path) -> None:
    """End the daemons that are idle for longest, so that one more may start. Raises NoDaemonError if all are busy."""
    sockets = socket_dir.sockets(directory)
    states = [state for path in sockets if (state := request_state(path, daemon_messages.STATE))]
    idle = sorted((state for state in states if not state.title), key=lambda state: -state.seconds)
    if len(states) - len(idle) >= MAX_DAEMONS:
        msg = f"{MAX_DAEMONS} daemons are running jobs already"
        raise NoDaemonError(msg)
    surplus = {state.pid for state in idle[: max(0, len(states) + 1 - MAX_DAEMONS)]}
    for path in sockets:
        if socket_dir.pid_of(path) in surplus:
            request_state(path, daemon_messages.END)


def request_state(path: Path, request: str) -> DaemonState | None:
    """Send `STATE` or `END` and return the answer; None if the daemon has died or is of an unknown version."""
    connection = socket_dir.connect(path, _TIMEOUT_SECONDS)
    if connection is None:
        return None
    with connection, contextlib.suppress(OSError, TypeError):
        wire.send(connection, request)
        return DaemonState(**daemon_messages.receive(connection))
    return None


# Follow the run.


def _follow_run(connection: socket.socket, job: Job, request: RunRequest) -> int | None:
    """Send the run, forward signals until it ends, and return its exit code; None if it did not start."""
    forwarded: list[SignalName] = []

    def forward(name: SignalName) -> None:
        forwarded.append(name)
        with contextlib.suppress(OSError):
            wire.send(connection, SignalForwarded(signal=name))

    with connection, signals.handled(job) as signalled:
        with contextlib.suppress(OSError):
            daemon_messages.send_run(connection, request)
        if daemon_messages.receive(connection) != daemon_messages.STARTED:
            return None
        signalled.go_to(forward, ends_process=False)  # the third signal ends the daemon, not this process
        message = daemon_messages.receive(connection)
    if isinstance(message, RunEnded):
        return message.code
    raise _daemon_died([name for name in forwarded if name in job.signals_to_handle])


def _daemon_died(stops: list[SignalName]) -> BaseException:
    """Return the error for a daemon that died during the run. `stops`: stop signals that it was sent."""
    if stops:  # without a daemon, the command itself would have died of the signal
        error = InterruptedByUserError(f"stopped by {stops[0]}")
        error.exit_code = signal_exit_code(signal.Signals[stops[0]])
        return error
    return RaylaunchError(
        "the daemon that ran this job died, and the run ended with it",
        hint="`dmesg` shows whether the kernel killed it for lack of memory; the next run starts a new daemon",
    )
