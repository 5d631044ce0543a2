"""`python -m raylaunch.cli.warm_driver`: the process that runs jobs for commands with `keep_warm`, one after another.

The first such command starts it, in a session of its own. It ends when it had nothing to run for `keep_warm` seconds,
and at once after a run that failed by a mistake of ours, or left something behind that the next run would meet.
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

from raylaunch.cli import fitness, one_run, warm_folder
from raylaunch.cli.in_place import InPlace, let_go_of_streams
from raylaunch.cli.warm_door import Caller, Door
from raylaunch.cli.warm_words import RestingAgent, Run, State
from raylaunch.errors import ExitCode

_FIRST_SECONDS = 60.0
"""For the command that starts a driver to hand over its run."""
_LINGER_SECONDS = 1.0
"""For the threads of a run to end after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The one that this process is connected to, if any."""

    address: Callable[[], str]
    agents: Callable[[], tuple[RestingAgent, ...]]
    """Who rests there."""
    is_kept: Callable[[], bool]
    """Whether it is still there, and the same."""


def main(where: str, key: str, first: str) -> int:
    """`where`: the folder of sockets; `key`: what commands must fit; `first`: the line to the first, as a number."""
    line, environ = socket.socket(fileno=int(first)), dict(os.environ)
    cluster = load()
    if fitness.key(environ) != key:
        one_run.say("a warm driver would not be what this command is: other code, or another environment")
        return ExitCode.INTERNAL
    server, path = warm_folder.listen(Path(where), key)
    let_go_of_streams()
    try:
        _WarmDriver(server, line, cluster).serve()
    finally:
        path.unlink(missing_ok=True)
    return ExitCode.OK


def load() -> Cluster:
    """Import what runs need. Ray adds to the environment when it is imported."""
    import raylaunch.cli.event_log  # noqa: PLC0415
    import raylaunch.cluster.run  # noqa: F401, PLC0415
    from raylaunch.cluster import ray_session  # noqa: PLC0415

    def agents() -> tuple[RestingAgent, ...]:
        return tuple((one.address, one.nproc, one.memory) for one in ray_session.AGENTS.resting())

    return Cluster(address=ray_session.kept_at, agents=agents, is_kept=ray_session.is_kept)


class _WarmDriver:
    def __init__(self, server: socket.socket, first: socket.socket, cluster: Cluster) -> None:
        self._cluster = cluster
        self._title = ""
        self._since = time.monotonic()
        self._until = self._since + _FIRST_SECONDS
        self._door = Door(server, first, self._state)

    def serve(self) -> None:
        """Until nobody has come for long enough."""
        while (caller := self._door.wait(self._until - time.monotonic())) is not None:
            self._serve(caller)

    def _serve(self, caller: Caller) -> None:
        assert caller.run is not None, "it came with a run"
        run = caller.run
        self._title, self._since = run.title, time.monotonic()
        place = InPlace(run, caller.streams)
        code = int(ExitCode.INTERNAL)
        try:
            place.enter()
            if self._cluster.is_kept():  # else this process ends, and the command, which was told nothing, has another
                code = self._run(run)
        except OSError as error:
            one_run.say(f"the warm driver cannot take this command's place: {error}")
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        finally:
            stays = code != ExitCode.INTERNAL and not _left_behind()
            self._title, self._since = "", time.monotonic()
            self._until = self._since + run.job.keep_warm
            self._door.finish(code, place.leave, stays=stays)

    def _run(self, run: Run) -> int:
        return one_run.answered(lambda: one_run.run(run.job, run.job_text)) if self._door.begin() else ExitCode.OK

    def _state(self) -> State:
        now = time.monotonic()
        return State(
            pid=os.getpid(),
            title=self._title,
            seconds=now - self._since,
            left=max(0.0, self._until - now),
            address=self._cluster.address(),
            agents=self._cluster.agents(),
        )


def _left_behind() -> bool:
    """Whether a thread of the run is still there: it might write to the terminal of the next one."""
    deadline = time.monotonic() + _LINGER_SECONDS
    while any(thread.name.startswith("raylaunch-output") for thread in threading.enumerate()):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
