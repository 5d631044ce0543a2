"""The thread of a group: carries out calls one after the other, and sees what becomes of the ranks.

It is told everything by its inbox, in the order in which it happens. The run itself, with its restarts, is driven by
`raylaunch.launch`'s own machinery in another thread. All it is asked for here is to change or stop the run, and why it
has restarted.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from raylaunch.cluster.control.control_messages import GetState, RefusedError, RestartRun, RunState, StopRun
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.errors import ClusterError, RunStoppedError
from raylaunch.worker_group.calls import (
    CallFailedError,
    GroupRestart,
    PackedArguments,
    PendingCall,
    RankRestartedError,
)
from raylaunch.worker_group.lines import GroupWorld, Heard, LineClosed, RankLine
from raylaunch.worker_group.rank import packing
from raylaunch.worker_group.rank.messages import Answer, Call, Create, End, RankHello, RankReady

OnRestart = Callable[[GroupRestart], object]

_LOST_PEER_SECONDS = 15.0
"""How long an error that a lost peer may have caused is kept back: a restart says that it was."""
_ANSWER_SECONDS = 10.0
_NAME = "WorkerGroup"
"""The name under which messages say that this changed a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegun:
    """The run can be asked from now on."""

    control: RunControl


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run has ended. None: all ranks have returned."""

    error: BaseException | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGroup:
    """No call follows. `now`: the ranks are killed, also in a call."""

    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartGroup:
    """Begin another attempt. `done` is told when the group is whole again."""

    done: Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackEnded:
    """`on_restart` has returned, or raised this."""

    error: BaseException | None


class CallQueue:
    """The calls that wait. Those that `on_restart` makes come before all others."""

    def __init__(self) -> None:
        self._calls: deque[PendingCall] = deque()
        self._urgent: deque[PendingCall] = deque()
        #: In which `on_restart` runs; None: it does not.
        self.callback: threading.Thread | None = None

    def add(self, call: PendingCall, thread: threading.Thread) -> None:
        """Add a call that a thread has made."""
        (self._urgent if thread is self.callback else self._calls).append(call)

    def put_back(self, call: PendingCall) -> None:
        """Make a call again before all others of its kind."""
        self._calls.appendleft(call)

    def next(self) -> PendingCall | None:
        """Remove and return the next call to carry out; None: none can be now."""
        calls = self._urgent if self.callback is not None else self._calls
        return calls.popleft() if calls else None

    def drain(self) -> list[PendingCall]:
        """Remove and return all calls."""
        calls = [*self._urgent, *self._calls]
        self._urgent.clear()
        self._calls.clear()
        return calls


class CallDispatcher:
    """See the module. All but `submit` and `inbox` belongs to its thread."""

    def __init__(self, creation: PackedArguments, on_restart: OnRestart | None) -> None:
        """`creation`: the arguments of the class."""
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: The newest attempt. Others read it, too.
        self.world = GroupWorld()
        #: Set when all ranks can be called for the first time, or the run has ended before.
        self.started = threading.Event()
        #: Set when the run has ended.
        self.ended = threading.Event()
        #: Why no call is carried out any more.
        self.error: BaseException | None = None
        self._creation = creation
        self._calls = _Carrying()
        self._restarts = _Restarting(on_restart, self.inbox)
        self._run = _DrivenRun()
        threading.Thread(target=self._work, daemon=True, name="raylaunch-group").start()

    def submit(self, call: PendingCall) -> None:
        """Carry out a call after all before it. Any thread may call this."""
        self.inbox.put((call, threading.current_thread()))

    def _work(self) -> None:
        while not self.ended.is_set():
            try:
                event = self.inbox.get(timeout=self._calls.seconds_left())
            except queue.Empty:
                self._calls.give_up_waiting()
            else:
                self._handle(event)
            self._advance()
        self.world.close()

    def _handle(self, event: Any) -> None:
        match event:
            case (PendingCall() as call, threading.Thread() as thread):
                self._calls.waiting.add(call, thread)
            case Heard(line=line, message=message, parts=parts):
                self._hear(line, message, parts)
            case LineClosed(line=line):
                if (rank := self.world.rank_of(line)) is not None:
                    self.world.remove(rank)
            case CallbackEnded(error=error):
                self._restarts.callback_ended(error, self._calls)
            case RunBegun(control=control):
                self._run.begin(control)
            case RestartGroup(done=done):
                self._restarts.ask(done, self._run)
            case CloseGroup(now=now):
                self._close(now=now or not self.world.is_whole or self._calls.is_busy)
            case RunEnded(error=error):
                self._end(error or RunStoppedError("the group is closed"))
            case _:
                raise AssertionError(event)

    def _hear(self, line: RankLine, message: Any, parts: list[bytearray]) -> None:
        rank = self.world.rank_of(line)
        match message:
            case RankHello():
                self._admit(line, message)
            case RankReady(completed=completed) if rank is not None:
                self.world.make_ready(rank, completed)
                if self.world.is_whole:
                    self._restarts.whole(self.world, self._calls, self._run)
                    self.started.set()
            case Answer() if rank is not None:
                self._calls.answered(rank, message, parts, self.world.size)

    def _admit(self, line: RankLine, hello: RankHello) -> None:
        if hello.attempt < self.world.attempt or self._run.is_closing:
            line.close()
            return
        if hello.attempt > self.world.attempt:
            self.world.close()
            self.world = GroupWorld(hello.attempt, hello.world_size)
        self.world.add(line, hello)
        if hello.has_object:
            return
        try:
            self._creation.check(hello.world_size)
        except ValueError as error:
            self.error = error
            self._close(now=True)
        else:
            lengths, own = self._creation.of(hello.place.rank)
            line.send(Create(lengths=lengths), own)

    def _advance(self) -> None:
        """Carry out the next call, if all ranks can be called and none is."""
        while self.world.is_whole and not self._calls.is_carried_out and (call := self._calls.waiting.next()):
            if not call.is_begun and not call.future.set_running_or_notify_cancel():
                continue
            call.is_begun = True
            if (error := self._restarts.untold(call)) is not None:
                call.future.set_exception(error)
            else:
                self._calls.carry_out(call, self.world)

    def _close(self, *, now: bool) -> None:
        self._calls.fail_all(self.error or RunStoppedError("the group is closed"))
        self._run.is_closing = True
        if now:
            self._run.stop()
        else:
            for line in self.world.lines.values():
                line.send(End())

    def _end(self, error: BaseException) -> None:
        self.error = self.error or error
        self._calls.fail_all(self.error)
        self._restarts.fail(self.error)
        while True:  # calls that were made meanwhile
            try:
                event = self.inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, tuple):
                _fail(event[0], self.error)
        self.ended.set()
        self.started.set()


class _DrivenRun:
    """What the run is asked for."""

    def __init__(self) -> None:
        self.control: RunControl | None = None
        self.is_closing = False

    def begin(self, control: RunControl) -> None:
        self.control = control
        if self.is_closing:
            self.stop()

    def stop(self) -> None:
        """Kill all ranks, now or when the run begins."""
        if self.control is not None:
            self.control.change(StopRun(by=_NAME, at_once=True))

    def restart(self) -> None:
        """Begin another attempt. Raises RefusedError."""
        if self.control is None:
            raise RefusedError("the group has not begun")
        self.control.change(RestartRun(by=_NAME)).result(_ANSWER_SECONDS)

    def why_restarted(self, since: int, attempt: int) -> tuple[tuple[int, ...], str]:
        """Return which ranks have failed in the attempts from `since` to before `attempt`, and why those ended."""
        if self.control is None:
            return (), ""
        state = self.control.answer(GetState())
        assert isinstance(state, RunState)
        found = [each for each in state.status.result.attempts if since <= each.number < attempt]
        failures = [failure for each in found for failure in each.failures]
        own = {failure.rank for failure in failures if not failure.stopped and not failure.is_collateral}
        ranks = own or {failure.rank for failure in failures if not failure.stopped}
        return tuple(sorted(ranks)), next((each.why_ended for each in found if each.why_ended), "")


class _Carrying:
    """The call that is carried out, and those that wait."""

    def __init__(self) -> None:
        self.waiting = CallQueue()
        #: The one that is carried out.
        self._call: PendingCall | None = None
        self._numbers = itertools.count(1)
        #: An error that a lost peer may have caused, and until when it is kept back.
        self._kept: tuple[float, BaseException] | None = None
        #: The call that a restart has interrupted, while `on_restart` runs.
        self.interrupted: PendingCall | None = None

    @property
    def is_carried_out(self) -> bool:
        return self._call is not None

    @property
    def is_busy(self) -> bool:
        return self._call is not None or self.interrupted is not None or self.waiting.callback is not None

    def seconds_left(self) -> float | None:
        """Return the seconds until `give_up_waiting` is due; None: it is not."""
        return max(0.0, self._kept[0] - time.monotonic()) if self._kept is not None else None

    def give_up_waiting(self) -> None:
        """No restart has followed an error."""
        if self._kept is not None and self._call is not None:
            self._fail(self._kept[1])

    def carry_out(self, call: PendingCall, world: GroupWorld) -> None:
        """Send a call to its ranks."""
        try:
            call.check(world.size)
        except ValueError as error:
            call.future.set_exception(error)
            return
        self._call, call.number, call.values = call, next(self._numbers), {}
        for rank, line in [*world.lines.items()] if call.rank is None else [(call.rank, world.lines[call.rank])]:
            lengths, parts = call.arguments.of(rank)
            line.send(Call(number=call.number, method=call.method, lengths=lengths), parts)

    def answered(self, rank: int, answer: Answer, parts: list[bytearray], size: int) -> None:
        """Take what a rank has answered to the call; earlier ones are over."""
        call = self._call
        if call is None or answer.number != call.number:
            return
        if answer.error:
            error = _error_of(call, rank, answer, parts)
            if not answer.lost_peer:
                self._fail(error)
            elif self._kept is None:
                self._kept = time.monotonic() + _LOST_PEER_SECONDS, error
            return
        try:
            call.values[rank] = packing.unpacked(parts)
        except Exception as error:  # noqa: BLE001
            msg = f"what `{call.method}` returned in rank {rank} cannot be unpickled here: {error}"
            failed = CallFailedError(msg, rank=rank)
            failed.__cause__ = error
            self._fail(failed)
            return
        if call.rank is not None:
            self._finish().future.set_result(call.values[rank])
        elif len(call.values) == size:
            self._finish().future.set_result([value for _, value in sorted(call.values.items())])

    def _finish(self) -> PendingCall:
        call, self._call, self._kept = self._call, None, None
        assert call is not None
        return call

    def _fail(self, error: BaseException) -> None:
        self._finish().future.set_exception(error)

    def interrupt(self) -> None:
        """Set the call aside that a restart has interrupted. One of `on_restart` itself is over."""
        if self._call is None:
            return
        call = self._finish()
        if self.waiting.callback is None:
            self.interrupted = call
        else:
            call.future.set_exception(RunStoppedError("another restart has interrupted this call of `on_restart`"))

    def go_on(self, restart: GroupRestart, error: BaseException | None) -> bool:
        """Decide what becomes of the interrupted call. Return whether anybody was told of the restart.

        `error`: what `on_restart` has raised.
        """
        call, self.interrupted = self.interrupted, None
        if call is None:
            return False
        if error is None and call.retry:
            self.waiting.put_back(call)
        else:
            _fail(call, error or RankRestartedError(restart))
        return True

    def fail_all(self, error: BaseException) -> None:
        """No call is carried out any more."""
        calls = [self._call, self.interrupted, *self.waiting.drain()]
        self._call = self.interrupted = self._kept = None
        for call in calls:
            if call is not None:
                _fail(call, error)


class _Restarting:
    """Tells of restarts: `on_restart`, and the call that was interrupted, or else the next one."""

    def __init__(self, on_restart: OnRestart | None, inbox: queue.SimpleQueue[Any]) -> None:
        self._on_restart = on_restart
        self._inbox = inbox
        self._attempt = 0
        #: Told when the restart is over that the caller has requested; None: it has not.
        self._asked: Future[None] | None = None
        #: The restart of which `on_restart` is told, and one that has happened meanwhile.
        self._present: GroupRestart | None = None
        self._later: GroupRestart | None = None
        #: What the next call raises.
        self._untold: BaseException | None = None

    def ask(self, done: Future[None], run: _DrivenRun) -> None:
        """Begin another attempt."""
        try:
            run.restart()
        except Exception as error:  # noqa: BLE001
            done.set_exception(ClusterError(f"the group is not restarted: {error}"))
        else:
            self._asked = done

    def whole(self, world: GroupWorld, calls: _Carrying, run: _DrivenRun) -> None:
        """All ranks can be called, at first or again."""
        before, self._attempt = self._attempt, world.attempt
        if not before:
            return
        ranks, why = run.why_restarted(before, world.attempt)
        restart = GroupRestart(ranks=ranks, why=why, attempt=world.attempt, completed=world.completed)
        calls.interrupt()
        if self._present is not None:
            self._later = restart
        else:
            self._tell(restart, calls)

    def _tell(self, restart: GroupRestart, calls: _Carrying) -> None:
        self._untold = None
        if self._on_restart is None:
            self._settle(restart, None, calls)
            return
        self._present = restart
        calls.waiting.callback = threading.Thread(target=self._call_back, args=(restart,), name="raylaunch-on-restart")
        calls.waiting.callback.start()

    def _call_back(self, restart: GroupRestart) -> None:
        assert self._on_restart is not None
        try:
            self._on_restart(restart)
        except BaseException as error:  # noqa: BLE001
            self._inbox.put(CallbackEnded(error=error))
        else:
            self._inbox.put(CallbackEnded(error=None))

    def callback_ended(self, error: BaseException | None, calls: _Carrying) -> None:
        """Go on, or tell `on_restart` of the restart that has happened meanwhile."""
        calls.waiting.callback = None
        restart, self._present = self._present, None
        later, self._later = self._later, None
        assert restart is not None
        if later is not None:
            self._tell(later, calls)
        else:
            self._settle(restart, error, calls)

    def _settle(self, restart: GroupRestart, error: BaseException | None, calls: _Carrying) -> None:
        is_told = calls.go_on(restart, error)
        asked, self._asked = self._asked, None
        if asked is None and not is_told:
            self._untold = error or RankRestartedError(restart, interrupted=False)
        elif asked is not None and error is not None:
            asked.set_exception(error)
        elif asked is not None:
            asked.set_result(None)

    def untold(self, call: PendingCall) -> BaseException | None:
        """Return what a call raises in place of being carried out; None: it is carried out."""
        error, self._untold = self._untold, None
        return None if call.retry else error

    def fail(self, error: BaseException) -> None:
        """The run has ended."""
        if self._asked is not None:
            self._asked.set_exception(error)


def _fail(call: PendingCall, error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        call.future.set_exception(error)


def _error_of(call: PendingCall, rank: int, answer: Answer, parts: list[bytearray]) -> CallFailedError:
    error = CallFailedError(f"`{call.method}` in rank {rank} raised {answer.error}\n\n{answer.traceback}", rank=rank)
    with contextlib.suppress(Exception):  # its class cannot be imported here
        cause = packing.unpacked(parts)
        error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error
