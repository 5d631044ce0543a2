"""Answers what others ask of a run: the place where each request of `control_messages` is carried out."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import TypeVar

from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlAnswer,
    ControlRequest,
    DrainNode,
    GetStacks,
    GetState,
    ListLogs,
    ReadLogs,
    Refused,
    ResizeRun,
    RestartRun,
    RunChange,
    RunState,
    StacksCollected,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.cluster.control.log_relay import LogOwner, LogRelay
from raylaunch.cluster.driver.request_desk import CollectedStacks, RequestAccepted, RequestDesk, RequestRefusedError
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.machine.events_and_actions import ResizeRequested, RestartRequested, StopRequested
from raylaunch.core.newtypes import SIGTERM, HostId, assert_never
from raylaunch.core.record.result import RunResult
from raylaunch.core.text import printable
from raylaunch.node.protocol.acceptor import SecretAddress

MOST_WAIT_SECONDS = 15.0
"""The longest time after which the state is answered."""


_READ_SECONDS = 3.0
"""How long the end of a run waits for clients that read its logs, which are gone with the agents."""
_LEAVE_SECONDS = 2.0
"""How long it waits for clients that look on, to tell them how it ended."""
_ANSWER_SECONDS = 10.0
"""How long the driver may take to answer: it may stand still, as in a file system that does not answer."""
_MOST_NAME = 100
_MOST_SECONDS = 7 * 86_400.0
Found = TypeVar("Found")


class RunControl:
    """Answers requests, in the threads of those who ask."""

    def __init__(
        self,
        desk: RequestDesk,
        folder: RunFolder,
        log_layout: str,
        source: LogOwner,
        hosts: Callable[[], frozenset[HostId] | None] = lambda: None,
    ) -> None:
        """`hosts`: returns all on which there may be nodes; None: there may be more later. Any thread may call it."""
        self._desk = desk
        self._folder = folder
        self._log_layout = log_layout
        self._hosts = hosts
        self._logs = LogRelay(source, folder.status)
        #: Set when the workers have ended; and when nothing of the run is left.
        self._over, self._ended = threading.Event(), threading.Event()
        self._result: RunResult | None = None
        self._server: ControlServer | None = None

    @property
    def address(self) -> SecretAddress | None:
        """Where it is served; None: nowhere."""
        return self._server.address if self._server is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the workers have ended, and their agents are about to."""
        return self._over.is_set()

    def serve(self, address: str) -> None:
        """Serve at this address of this machine, until `close`. Raises OSError."""
        self._server = ControlServer(address, self.answers)
        self._server.start()

    def over(self) -> None:
        """Answer clients that wait for the workers' end. Then wait some seconds for clients that read logs."""
        self._over.set()
        if self._server is not None:
            self._server.await_clients(_READ_SECONDS, reading_logs=True)

    def ended(self, result: RunResult) -> None:
        """Publish the result of the run, of which nothing is left. Wait some seconds for clients to get it."""
        self._result = result
        self._over.set()
        self._ended.set()
        if self._server is not None:
            self._server.await_clients(_LEAVE_SECONDS)

    def close(self) -> None:
        """Close the control port and the connections of all clients. Nothing happens if it was never opened."""
        if self._server is not None:
            self._server.close()

    def answers(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Carry a request out, and yield the answers."""
        match request:
            case GetState():
                awaited = self._ended if self._over.is_set() else self._over
                awaited.wait(min(request.wait, MOST_WAIT_SECONDS))
                yield replace(self._state(), can_save=not request.before_change or self._can_save())
            case StopRun() | RestartRun() | ResizeRun() | DrainNode():
                yield _answer(self.change(request), _accepted)
            case GetStacks():
                yield _answer(self._desk.stacks(), partial(_collected, ranks=request.ranks))
            case ListLogs():
                yield self._logs.spans(request)
            case ReadLogs():
                yield from self._logs.blocks(request)

    def _can_save(self) -> bool:
        """Return whether the workers can save, as far as is known: True where the driver does not tell."""
        with contextlib.suppress(RequestRefusedError, FutureTimeoutError):
            return self._over.is_set() or self._desk.check().result(timeout=_ANSWER_SECONDS).can_save
        return True

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

    def change(self, request: RunChange) -> Future[RequestAccepted]:
        """Order the driver to change the run. The returned future tells when it has begun to."""
        by = printable(request.by)[:_MOST_NAME] or "a person"
        match request:
            case DrainNode(node=node):
                return self._desk.drain(printable(node), by, self._hosts())
            case ResizeRun(min_nodes=low, max_nodes=high):
                return self._desk.event(lambda at: ResizeRequested(at=at, by=by, min_nodes=low, max_nodes=high))
            case RestartRun():
                seconds = _seconds(request.save_seconds)
                return self._desk.event(lambda at: RestartRequested(at=at, by=by, save_seconds=seconds))
            case StopRun(at_once=now):
                seconds = 0.0 if now else _seconds(request.save_seconds)
                return self._desk.event(
                    lambda at: StopRequested(at=at, signal=SIGTERM, by=by, save_seconds=seconds, now=now)
                )
            case _:
                return assert_never(request)


def _seconds(seconds: float) -> float:
    """Return a time that timers can be set for, whatever a client says."""
    return min(max(0.0, seconds), _MOST_SECONDS) if math.isfinite(seconds) else _MOST_SECONDS


def _answer(answer: Future[Found], told: Callable[[Found], ControlAnswer]) -> ControlAnswer:
    try:
        return told(answer.result(timeout=_ANSWER_SECONDS))
    except RequestRefusedError as refused:
        return Refused(why=str(refused))
    except FutureTimeoutError:
        hint = "it may still do it: `raylaunch status` shows that"
        return Refused(why=f"the driver has not answered within {_ANSWER_SECONDS:g} s", hint=hint)


def _accepted(found: RequestAccepted) -> Accepted:
    return Accepted(attempt=found.attempt, phase=found.phase, status=found.status, can_save=found.can_save)


def _collected(found: CollectedStacks, ranks: Sequence[int]) -> StacksCollected:
    wanted = tuple(stack for stack in found.stacks if stack.rank in ranks)
    return StacksCollected(attempt=found.attempt, groups=found.groups, stacks=wanted)


@contextlib.contextmanager
def served(control: RunControl, session: Session, warn: Callable[[str], None]) -> Iterator[RunControl]:
    """Serve a run while it lasts. `warn` takes a message if that is not possible: the run goes on without it."""
    try:
        control.serve(session.own_address)
    except OSError as error:
        warn(f"other machines cannot look at this run: {error}")
    with contextlib.closing(control):
        yield control
