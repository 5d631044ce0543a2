"""Answers what others ask of a run: the place where each request of `control_messages` is carried out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from raylaunch.cluster.agent.acceptor import SecretAddress
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlAnswer,
    ControlRequest,
    GetState,
    ListLogs,
    ReadLogs,
    Refused,
    RunState,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.machine.events_and_actions import Event, StopRequested
from raylaunch.core.newtypes import SIGTERM, RunTime
from raylaunch.core.record.result import RunResult

MOST_WAIT_SECONDS = 15.0
"""The longest time after which the state is answered."""


_READ_SECONDS = 3.0
"""How long the end of a run waits for clients that read its logs, which are gone with the agents."""
_LEAVE_SECONDS = 2.0
"""How long it waits for clients that look on, to tell them how it ended."""


class RunOwner(Protocol):
    """The driver, as far as requests need it. Its method may be called from any thread, and never blocks."""

    def request(self, event: Callable[[RunTime], Event]) -> None:
        """Have the machine handle an event, which is made with its time."""


class RunControl:
    """Answers requests, in the threads of those who ask."""

    def __init__(self, driver: RunOwner, folder: RunFolder, log_layout: str) -> None:
        self._driver = driver
        self._folder = folder
        self._log_layout = log_layout
        #: Set when the workers have ended; and when nothing of the run is left.
        self._over, self._ended = threading.Event(), threading.Event()
        self._result: RunResult | None = None
        self._server: ControlServer | None = None

    @property
    def address(self) -> SecretAddress | None:
        """Where it is served; None: nowhere."""
        return self._server.address if self._server is not None else None

    def serve(self, address: str) -> None:
        """Serve at this address of this machine, until `close`. Raises OSError."""
        self._server = ControlServer(address, self.answers)
        self._server.start()

    def over(self) -> None:
        """Answer at once who waits for the end: the workers have ended. Waits for seconds for those who read logs."""
        self._over.set()
        if self._server is not None:
            self._server.await_clients(_READ_SECONDS, reading_logs=True)

    def ended(self, result: RunResult) -> None:
        """Take note of what came of the run: nothing of it is left. Waits for seconds for those who are told."""
        self._result = result
        self._over.set()
        self._ended.set()
        if self._server is not None:
            self._server.await_clients(_LEAVE_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()

    def answers(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Carry a request out, and yield the answers."""
        match request:
            case GetState():
                awaited = self._ended if self._over.is_set() else self._over
                awaited.wait(min(request.wait, MOST_WAIT_SECONDS))
                yield self._state()
            case StopRun():
                yield self._stop(request)
            case ListLogs() | ReadLogs():
                yield Refused(why="the logs cannot be read")

    def _state(self) -> RunState:
        result = self._result  # first: the status is newer
        return RunState(
            status=self._folder.status(),
            log_layout=self._log_layout,
            keeps_logs=self._folder.path is not None,
            ended=result is not None,
            exit_code=result.exit_code if result is not None else None,
            why=result.why if result is not None else "",
        )

    def _stop(self, request: StopRun) -> Accepted:
        for _ in range(2 if request.at_once else 1):  # at the second one the machine does not wait for the workers
            self._driver.request(lambda at: StopRequested(at=at, signal=SIGTERM))
        return Accepted()


@contextlib.contextmanager
def served(control: RunControl, session: Session, warn: Callable[[str], None]) -> Iterator[RunControl]:
    """Serve a run while it lasts. `warn` takes a message if that is not possible: the run goes on without it."""
    try:
        control.serve(session.own_address)
    except (OSError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
        warn(f"other machines cannot look at this run: {error}")
    with contextlib.closing(control):
        yield control
