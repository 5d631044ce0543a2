"""The thread of a group: carries out calls one after the other, and sees what becomes of the ranks.

It is told everything by its inbox, in the order in which it happens. The run itself, with its restarts, is driven by
`raylaunch.launch`'s own machinery in another thread. All it is asked for here is to change or stop the run, and why it
has restarted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raylaunch.cluster.control.control_messages import (
    Accepted,
    GetState,
    RefusedError,
    ResizeRun,
    RestartRun,
    RunChange,
    RunState,
    StopRun,
)
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.core.text import count
from raylaunch.errors import ClusterError, RunStoppedError
from raylaunch.worker_group.calls import (
    CallFailedError,
    Datasets,
    GroupRestart,
    PackedArguments,
    PendingCall,
    PendingResize,
    RankRestartedError,
    fail,
)
from raylaunch.worker_group.lending import Deliveries, Delivery, Stored
from raylaunch.worker_group.lines import GroupWorld, Heard, LineClosed, RankLine
from raylaunch.worker_group.rank import packing
from raylaunch.worker_group.rank.messages import Answer, Begin, Call, End, RankHello, RankReady

OnRestart = Callable[[GroupRestart], object]

_LOST_PEER_SECONDS = 15.0
"""How long an error that a lost peer may have caused is kept back: a restart says that it was."""
_LOOK_AGAIN_SECONDS = 1.0
"""After the time for a resize is over while ranks make their objects: the cluster may have provided the nodes."""
_NAME = "WorkerGroup"
"""The name under which messages say that this changed a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegun:
    """The run can be asked from now on."""

    control: RunControl
    bounds: tuple[int, int]
    """MIN and MAX of its number of nodes."""


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
    """The calls that wait, and resizes. Those that `on_restart` makes come before all others."""

    def __init__(self) -> None:
        self._calls: deque[PendingCall | PendingResize] = deque()
        self._urgent: deque[PendingCall] = deque()
        #: In which `on_restart` runs; None: it does not.
        self.callback: threading.Thread | None = None

    def add(self, call: PendingCall, thread: threading.Thread) -> None:
        """Add a call that a thread has made."""
        (self._urgent if thread is self.callback else self._calls).append(call)

    def add_resize(self, resize: PendingResize) -> None:
        """Add a resize, which comes after all calls before it."""
        self._calls.append(resize)

    def put_back(self, call: PendingCall) -> None:
        """Make a call again before all others of its kind."""
        self._calls.appendleft(call)

    def next(self, *, is_resizing: bool) -> PendingCall | PendingResize | None:
        """Remove and return what is next to carry out; None: nothing can be now."""
        if self._urgent:
            return self._urgent.popleft()
        return self._calls.popleft() if self._calls and self.callback is None and not is_resizing else None

    def drain(self) -> list[PendingCall | PendingResize]:
        """Remove and return all calls."""
        calls = [*self._urgent, *self._calls]
        self._urgent.clear()
        self._calls.clear()
        return calls


class CallDispatcher:
    """See the module. All but `submit` and `inbox` belongs to its thread."""

    def __init__(self, creation: PackedArguments, datasets: Datasets, on_restart: OnRestart | None) -> None:
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
        self._datasets = datasets
        self._deliveries = Deliveries(self.inbox)
        self._calls = _Carrying(self._deliveries)
        self._restarts = _Restarting(on_restart, self.inbox)
        self._resizing = _Resizing()
        self._run = _DrivenRun()
        threading.Thread(target=self._work, daemon=True, name="raylaunch-group").start()

    def submit(self, call: PendingCall) -> None:
        """Carry out a call after all before it. Any thread may call this."""
        self.inbox.put((call, threading.current_thread()))

    def refuse_in_callback(self, what: str) -> None:
        """Raise RuntimeError in the thread of `on_restart`: what waits for the next restart would wait for itself."""
        if self._calls.waiting.callback is threading.current_thread():
            msg = f"`on_restart` cannot {what} the group: that would wait for the end of `on_restart`"
            raise RuntimeError(msg)

    def _work(self) -> None:
        while not self.ended.is_set():
            try:
                self._take_turn()
            except Exception as error:  # noqa: BLE001  # of Ray's: the program may have disconnected
                self._fail(error)
        self.world.close()

    def _take_turn(self) -> None:
        due = min(self._calls.give_up_at, self._resizing.give_up_at)
        try:
            event = self.inbox.get(timeout=max(0.0, due - time.monotonic()) if due < math.inf else None)
        except queue.Empty:
            now = time.monotonic()
            self._calls.give_up_waiting(now)
            self._resizing.give_up_waiting(now, self.world, self._run)
        else:
            self._handle(event)
        self._advance()

    def _handle(self, event: Any) -> None:
        match event:
            case (PendingCall() as call, threading.Thread() as thread):
                self._calls.waiting.add(call, thread)
            case Heard() | Delivery() | Stored():
                self._take(event)
            case LineClosed(line=line):
                self.world.remove(line)
            case CallbackEnded(error=error):
                self._restarts.callback_ended(error, self._calls)
            case RunBegun(control=control, bounds=bounds):
                self._run.begin(control, bounds)
            case PendingResize():
                self._ask_resize(event)
            case RestartGroup(done=done):
                self._restarts.ask(done, self._run)
            case CloseGroup(now=now):
                is_busy = self._calls.is_busy or self._resizing.goes_on
                self._close(now=now or not self.world.is_whole or is_busy)
            case RunEnded(error=error):
                self._end(error or RunStoppedError("the group is closed"))
            case _:
                raise AssertionError(event)

    def _take(self, event: Heard | Delivery | Stored) -> None:
        match event:
            case Heard(line=line, message=message, parts=parts):
                self._hear(line, message, parts)
            case Delivery():
                if (failed := self._deliveries.go_on(event)) is not None:
                    self._undelivered(event, failed)
            case Stored(number=number, rank=rank, ref=ref, error=error):
                self._deliveries.stored(event)
                self._calls.stored(number, rank, ref, error, self.world.size)

    def _hear(self, line: RankLine, message: Any, parts: list[bytearray]) -> None:
        rank = self.world.rank_of(line)
        match message:
            case RankHello():
                self._admit(line, message)
            case RankReady(completed=completed) if rank is not None:
                self.world.make_ready(rank, completed)
                if self.world.is_whole:
                    self._deliveries.release(-self.world.attempt)
                    self._restarts.whole(self.world, self._calls, self._run, self._resizing.finished(self.world))
                    self.started.set()
            case Answer() if rank is not None:
                self._calls.answered(rank, message, parts, self.world)

    def _admit(self, line: RankLine, hello: RankHello) -> None:
        if hello.attempt < self.world.attempt or self._run.is_closing:
            line.close()
            return
        rank = hello.place.rank
        try:
            if hello.attempt > self.world.attempt:
                self._begin_attempt(hello.attempt, hello.world_size)
            self.world.add(line, hello)
            arguments = [] if hello.has_object else self._creation.of(rank)
            values = [self._datasets.of(rank), *arguments]
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        else:
            self._deliveries.send(-hello.attempt, line, hello.ray_node, Begin(), values)

    def _begin_attempt(self, attempt: int, world_size: int) -> None:
        """Raise ValueError if the class has parts for another number of ranks, and what Ray does for a dataset."""
        self.world.close()
        self._deliveries.release(-self.world.attempt)
        self.world = GroupWorld(attempt, world_size)
        self._creation.check(world_size)
        self._datasets.split(world_size)

    def _undelivered(self, delivery: Delivery, error: BaseException) -> None:
        if isinstance(delivery.message, Call):
            self._calls.undelivered(delivery.message.number, error)
        elif not self._run.is_closing:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the group: it cannot go on."""
        self.error = error
        self._close(now=True)

    def _ask_resize(self, resize: PendingResize) -> None:
        """Let a resize wait for its turn, unless it is known to be impossible."""
        try:
            why = self._run.why_no_room(resize.min_nodes)
            if self._creation.is_scattered:
                why = "the class got a part for each rank by `scatter`"
        except Exception as error:  # noqa: BLE001
            why = str(error)
        if why or self._run.is_closing:
            resize.done.set_exception(self.error or ClusterError(f"the group is not resized: {why or 'it is closed'}"))
        else:
            self._calls.waiting.add_resize(resize)

    def _advance(self) -> None:
        """Carry out the next call, if all ranks can be called and none is."""
        while self.world.is_whole and not self._calls.is_carried_out:
            call = self._calls.waiting.next(is_resizing=self._resizing.goes_on)
            if call is None:
                return
            if isinstance(call, PendingResize):
                self._resizing.begin(call, self.world, self._run)
                continue
            if not call.is_begun and not call.future.set_running_or_notify_cancel():
                continue
            call.is_begun = True
            if (error := self._restarts.untold(call)) is not None:
                call.future.set_exception(error)
            else:
                self._calls.carry_out(call, self.world)

    def _close(self, *, now: bool) -> None:
        error = self.error or RunStoppedError("the group is closed")
        self._calls.fail_all(error)
        self._resizing.fail(error)
        self._run.is_closing = True
        if now:
            self._run.stop()
        else:
            for line in self.world.lines.values():
                line.send(End())

    def _end(self, error: BaseException) -> None:
        self.error = self.error or error
        self._calls.fail_all(self.error)
        self._resizing.fail(self.error)
        self._restarts.fail(self.error)
        self._deliveries.close()
        self._datasets.close()
        self.ended.set()
        self.started.set()
        with contextlib.suppress(queue.Empty):
            while True:  # what was asked before `ended` was set
                event = self.inbox.get_nowait()
                if isinstance(event, tuple):
                    fail(event[0].future, self.error)
                elif isinstance(event, PendingResize | RestartGroup):
                    fail(event.done, self.error)


class _DrivenRun:
    """What the run is asked for."""

    def __init__(self) -> None:
        self.control: RunControl | None = None
        self.is_closing = False
        #: MIN and MAX of the number of nodes.
        self.bounds = 0, 0

    def begin(self, control: RunControl, bounds: tuple[int, int]) -> None:
        self.control, self.bounds = control, bounds
        if self.is_closing:
            self.stop()

    def stop(self) -> None:
        """Kill all ranks, now or when the run begins."""
        if self.control is not None:
            self.control.change(StopRun(by=_NAME, at_once=True))

    def restart(self) -> int:
        """Begin another attempt, and return the number of the one before. Raises RefusedError."""
        return self._change(RestartRun(by=_NAME)).attempt

    def _change(self, request: RunChange) -> Accepted:
        if self.control is None:
            raise RefusedError("the group has not begun")
        accepted = self.control.answer(request)
        assert isinstance(accepted, Accepted)
        return accepted

    def why_no_room(self, nodes: int) -> str:
        """Return why the cluster could never hold this number of nodes; "": it could, as far as is known."""
        return self.control.why_no_room(nodes) if self.control is not None else ""

    def resize(self, low: int, high: int) -> None:
        """Have another number of nodes from now on. Raises RefusedError."""
        self._change(ResizeRun(by=_NAME, min_nodes=low, max_nodes=high))
        self.bounds = low, high

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

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
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

    @property
    def give_up_at(self) -> float:
        """The time.monotonic() at which `give_up_waiting` is due."""
        return self._kept[0] if self._kept is not None else math.inf

    def give_up_waiting(self, now: float) -> None:
        """Fail a call for whose error no restart has followed in time."""
        if self._kept is not None and self._call is not None and self._kept[0] <= now:
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
            message = Call(number=call.number, method=call.method, shares_result=call.returns_ref)
            self._deliveries.send(call.number, line, world.ray_node(rank), message, call.arguments.of(rank))

    def undelivered(self, number: int, error: BaseException) -> None:
        """The arguments of a call cannot be had from Ray."""
        if self._call is not None and self._call.number == number:
            self._fail(error)

    def answered(self, rank: int, answer: Answer, parts: list[bytearray], world: GroupWorld) -> None:
        """Take what a rank has answered to the call; earlier ones are over."""
        call = self._call
        if call is None or answer.number != call.number:
            return
        if answer.error:
            self._fail(_error_of(call, rank, answer, parts), of_lost_peer=answer.lost_peer)
            return
        if answer.shared is not None:
            self._deliveries.store(call.number, rank, world.ray_node(rank), answer.shared)
            return
        try:
            value = packing.unpacked(parts)
        except BaseException as error:  # noqa: BLE001
            msg = f"what `{call.method}` returned in rank {rank} cannot be unpickled here: {error}"
            failed = CallFailedError(msg, rank=rank)
            failed.__cause__ = error
            self._fail(failed)
        else:
            self._returned(call, rank, value, world.size)

    def stored(self, number: int, rank: int, ref: Any, error: BaseException | None, size: int) -> None:
        """What a rank has returned is in Ray, or cannot be."""
        call = self._call
        if call is None or number != call.number:
            return
        if error is None:
            self._returned(call, rank, ref, size)
            return
        failed = CallFailedError(f"what `{call.method}` returned in rank {rank} is not in Ray: {error}", rank=rank)
        failed.__cause__ = error
        self._fail(failed, of_lost_peer=isinstance(error, OSError))  # its file is gone if the rank is

    def _returned(self, call: PendingCall, rank: int, value: Any, size: int) -> None:
        call.values[rank] = value
        if call.rank is not None:
            self._finish().future.set_result(value)
        elif len(call.values) == size:
            self._finish().future.set_result([value for _, value in sorted(call.values.items())])

    def _finish(self) -> PendingCall:
        call, self._call, self._kept = self._call, None, None
        assert call is not None
        self._deliveries.release(call.number)
        return call

    def _fail(self, error: BaseException, *, of_lost_peer: bool = False) -> None:
        """Fail the call, at once or, if a lost peer may be the cause, unless a restart follows in time."""
        if not of_lost_peer:
            self._finish().future.set_exception(error)
        elif self._kept is None:
            self._kept = time.monotonic() + _LOST_PEER_SECONDS, error

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
            fail(call.future, error or RankRestartedError(restart))
        return True

    def fail_all(self, error: BaseException) -> None:
        """No call is carried out any more."""
        calls = [call for call in (self._call, self.interrupted, *self.waiting.drain()) if call is not None]
        self._call = self.interrupted = self._kept = None
        for call in calls:
            fail(call.done if isinstance(call, PendingResize) else call.future, error)


class _Resizing:
    """The resize that goes on. Meanwhile only calls that `on_restart` makes are carried out."""

    def __init__(self) -> None:
        self._wanted: PendingResize | None = None
        #: MIN and MAX before it.
        self._before = 0, 0
        #: The time.monotonic() at which `give_up_waiting` is due.
        self.give_up_at = math.inf

    @property
    def goes_on(self) -> bool:
        return self._wanted is not None

    def begin(self, wanted: PendingResize, world: GroupWorld, run: _DrivenRun) -> None:
        """Request other nodes. If there are as many already, nothing follows."""
        self._before = run.bounds
        try:
            run.resize(wanted.min_nodes, wanted.max_nodes)
        except Exception as error:  # noqa: BLE001
            wanted.done.set_exception(ClusterError(f"the group is not resized: {error}"))
            return
        self._wanted, self.give_up_at = wanted, time.monotonic() + wanted.seconds
        for done in self.finished(world):
            done.set_result(None)

    def finished(self, world: GroupWorld) -> list[Future[None]]:
        """Return what is to be told when the group is as large as it was to be; empty: it is not, or none goes on."""
        wanted = self._wanted
        if wanted is None or not wanted.min_nodes <= world.node_count <= wanted.max_nodes:
            return []
        self._wanted, self.give_up_at = None, math.inf
        return [wanted.done]

    def give_up_waiting(self, now: float, world: GroupWorld, run: _DrivenRun) -> None:
        """Go on with the nodes that there are, since the cluster has not provided others in time."""
        if self._wanted is None or now < self.give_up_at:
            return
        if world.is_beginning:
            self.give_up_at = now + _LOOK_AGAIN_SECONDS
            return
        with contextlib.suppress(RefusedError):  # the run is about to end
            run.resize(*self._before)
        nodes, seconds = count(self._wanted.min_nodes, "node"), self._wanted.seconds
        msg = f"the cluster did not provide {nodes} within {seconds:g} s: the group goes on with {world.node_count}"
        self.fail(ClusterError(msg))

    def fail(self, error: BaseException) -> None:
        """It does not go on."""
        wanted, self._wanted, self.give_up_at = self._wanted, None, math.inf
        if wanted is not None:
            fail(wanted.done, error)


class _Restarting:
    """Tells of restarts: `on_restart`, and the call that was interrupted, or else the next one."""

    def __init__(self, on_restart: OnRestart | None, inbox: queue.SimpleQueue[Any]) -> None:
        self._on_restart = on_restart
        self._inbox = inbox
        self._attempt = self._size = 0
        #: Told when the restart or the resize is over that the caller has requested, in an attempt after this one.
        self._asked: list[tuple[int, Future[None]]] = []
        #: The restart of which `on_restart` is told, and one that has happened meanwhile.
        self._present: GroupRestart | None = None
        self._later: GroupRestart | None = None
        #: What the next call raises.
        self._untold: BaseException | None = None

    def ask(self, done: Future[None], run: _DrivenRun) -> None:
        """Begin another attempt."""
        try:
            self._asked.append((run.restart(), done))
        except Exception as error:  # noqa: BLE001
            done.set_exception(ClusterError(f"the group is not restarted: {error}"))

    def whole(self, world: GroupWorld, calls: _Carrying, run: _DrivenRun, resized: list[Future[None]]) -> None:
        """All ranks can be called, at first or again. `resized`: what is to be told, since a resize is over."""
        before, self._attempt = self._attempt, world.attempt
        size_before, self._size = self._size, world.size
        if not before:
            return
        self._asked += [(before, done) for done in resized]
        ranks, why = run.why_restarted(before, world.attempt)
        restart = GroupRestart(
            ranks=ranks,
            why=why,
            attempt=world.attempt,
            world_size=world.size,
            world_size_before=size_before,
            completed=world.completed,
        )
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
        asked = [done for before, done in self._asked if before < restart.attempt]
        self._asked = [each for each in self._asked if each[0] >= restart.attempt]
        if not asked and not is_told:
            self._untold = error or RankRestartedError(restart, interrupted=False)
        for done in asked:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(None)

    def untold(self, call: PendingCall) -> BaseException | None:
        """Return what a call raises in place of being carried out; None: it is carried out."""
        error, self._untold = self._untold, None
        return None if call.retry else error

    def fail(self, error: BaseException) -> None:
        """The run has ended."""
        for _, done in self._asked:
            fail(done, error)


def _error_of(call: PendingCall, rank: int, answer: Answer, parts: list[bytearray]) -> CallFailedError:
    error = CallFailedError(f"`{call.method}` in rank {rank} raised {answer.error}\n\n{answer.traceback}", rank=rank)
    with contextlib.suppress(BaseException):  # its class cannot be imported here
        cause = packing.unpacked(parts)
        error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error
