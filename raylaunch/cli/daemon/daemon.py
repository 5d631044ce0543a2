"""The daemon process, `python -m raylaunch.cli.daemon.daemon`: it runs jobs for `keep_warm`, one at a time.

The first command with `keep_warm` starts it, in a session of its own. It exits after `keep_warm` seconds without a run,
and at once after an internal error or a run that left a thread behind, which could disturb the next run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raylaunch.cli import run_once
from raylaunch.cli.daemon import fingerprint, socket_dir
from raylaunch.cli.daemon.daemon_messages import DaemonState, IdleAgent, RunRequest
from raylaunch.cli.daemon.listener import ClientConnection, Listener
from raylaunch.cli.daemon.takeover import Takeover, close_streams
from raylaunch.errors import ExitCode

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
        takeover = Takeover(run, client.streams)
        code = int(ExitCode.INTERNAL)
        try:
            takeover.enter()
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
            self._listener.finish(code, takeover.leave, stays=stays)

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
