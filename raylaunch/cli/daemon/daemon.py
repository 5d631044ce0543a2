"""The daemon process, `python -m raylaunch.cli.daemon.daemon`: it runs jobs for `keep_warm`, one at a time.

The first command with `keep_warm` starts it, in a session of its own. It exits after `keep_warm` seconds without a run,
and at once after an internal error or a run that left a thread behind, which could disturb the next run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylaunch.cli import run_once
from raylaunch.cli.daemon import fingerprint, socket_dir
from raylaunch.cli.daemon.daemon_messages import DaemonState, IdleAgent, RunRequest
from raylaunch.cli.daemon.listener import ClientConnection, Listener
from raylaunch.errors import ExitCode

_IDLE_UMASK = 0o077


class Impersonation:
    """The folder, environment, streams, umask and signals of a command, which this process has during its run."""

    def __init__(self, run: RunRequest, streams: dict[int, int]) -> None:
        """`streams`: open files by the descriptor (0, 1, 2) that they become; `enter` or `leave` closes them."""
        self._run = run
        self._streams = streams
        self._environ = dict(os.environ)
        names = {*run.job.signals_to_handle, *run.job.signals_to_forward} & signal.Signals.__members__.keys()
        self._signals = {name: signal.Signals[name] for name in names}

    def enter(self) -> None:
        """Take over. Raises OSError if the folder cannot be entered."""
        os.chdir(self._run.cwd)
        os.umask(self._run.umask)
        _set_environ(self._run.environ)
        for number, fd in self._streams.items():
            os.dup2(fd, number)
            os.close(fd)
        self._streams = {}
        for name, number in self._signals.items():
            signal.signal(number, self._disposition(name, number))

    def _disposition(self, name: str, number: signal.Signals) -> Any:
        """Return the handler until the run sets its own: Python's default, but a forwarded signal must not kill."""
        if name in self._run.ignored:
            return signal.SIG_IGN
        if name in self._run.job.signals_to_forward:
            return lambda *_: None
        return signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL

    def leave(self) -> None:
        """Flush the output and restore what was there before `enter`."""
        for number in self._signals.values():
            signal.signal(number, signal.SIG_DFL)
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader is gone
                file.flush()
        for fd in self._streams.values():
            os.close(fd)
        close_streams()
        for file in (sys.stdout, sys.stderr):
            file.flush()  # discards what could not be written, or the next run would print it
        _set_environ(self._environ)
        os.umask(_IDLE_UMASK)
        os.chdir("/")


def close_streams() -> None:
    """Replace stdin, stdout and stderr by /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def _set_environ(environ: dict[str, str]) -> None:
    """Set only the variables that differ, since threads of Ray may read the others; keep those that Ray has set."""
    for name in os.environ.keys() - environ.keys():
        if not name.startswith("RAY_"):
            del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


_FIRST_SECONDS = 60.0
"""Time for the command that started the daemon to send its run."""
_LINGER_SECONDS = 1.0
"""Time for the threads of a run to end after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonCluster:
    """Functions that describe the Ray cluster that this process is connected to, if any."""

    address: Callable[[], str]
    agents: Callable[[], tuple[IdleAgent, ...]]
    """The idle agents that are kept there."""
    is_kept: Callable[[], bool]
    """Whether the cluster still exists and is the same."""


def main(directory: str, key: str, descriptor: str) -> int:
    """Serve until idle for too long. The arguments come from the command that starts the daemon.

    `directory`: the folder for the socket; `key`: the fingerprint; `descriptor`: of the connection to that command.
    """
    connection, environ = socket.socket(fileno=int(descriptor)), dict(os.environ)
    cluster = load()
    if fingerprint.key(environ) != key:
        run_once.say("the daemon's code or environment would differ from this command's")
        return ExitCode.INTERNAL
    server, path = socket_dir.listen(Path(directory), key)
    close_streams()
    try:
        _Daemon(server, connection, cluster).serve()
    finally:
        path.unlink(missing_ok=True)
    return ExitCode.OK


def load() -> DaemonCluster:
    """Import what runs need, before the environment is compared: importing Ray adds variables to it."""
    import raylaunch.cli.output.event_log  # noqa: PLC0415
    import raylaunch.cluster.run  # noqa: F401, PLC0415
    from raylaunch.cluster.session import ray_session  # noqa: PLC0415

    def agents() -> tuple[IdleAgent, ...]:
        return tuple((agent.address, agent.nproc, agent.memory) for agent in ray_session.AGENTS.agents())

    return DaemonCluster(address=ray_session.kept_at, agents=agents, is_kept=ray_session.is_kept)


class _Daemon:
    def __init__(self, server: socket.socket, first: socket.socket, cluster: DaemonCluster) -> None:
        self._cluster = cluster
        self._title = ""
        self._since = time.monotonic()
        self._until = self._since + _FIRST_SECONDS
        self._listener = Listener(server, first, self._state)

    def serve(self) -> None:
        """Run the jobs of commands until none has come for long enough."""
        while (client := self._listener.wait(self._until - time.monotonic())) is not None:
            self._serve(client)

    def _serve(self, client: ClientConnection) -> None:
        run = client.run
        assert run is not None, "`wait` returns connections with a run"
        self._title, self._since = run.title, time.monotonic()
        impersonation = Impersonation(run, client.streams)
        code = int(ExitCode.INTERNAL)
        try:
            impersonation.enter()
            if self._cluster.is_kept():  # else this process exits, and the command, whose run has not started, retries
                code = self._run(run)
        except OSError as error:
            run_once.say(f"the daemon cannot run this command's job: {error}")
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        finally:
            stays = code != ExitCode.INTERNAL and not _has_leftover_threads()
            self._title, self._since = "", time.monotonic()
            self._until = self._since + run.job.keep_warm
            self._listener.finish(code, impersonation.leave, stays=stays)

    def _run(self, run: RunRequest) -> int:
        return (
            run_once.exit_code_of(lambda: run_once.run(run.job, run.job_text))
            if self._listener.begin()
            else ExitCode.OK
        )

    def _state(self) -> DaemonState:
        now = time.monotonic()
        return DaemonState(
            pid=os.getpid(),
            title=self._title,
            seconds=now - self._since,
            left=max(0.0, self._until - now),
            address=self._cluster.address(),
            agents=self._cluster.agents(),
        )


def _has_leftover_threads() -> bool:
    """Return whether a thread of the run is still alive: it could write to the terminal of the next run."""
    deadline = time.monotonic() + _LINGER_SECONDS
    while any(thread.name.startswith("raylaunch-output") for thread in threading.enumerate()):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
