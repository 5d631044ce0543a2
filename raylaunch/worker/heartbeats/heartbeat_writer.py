"""Writes one worker's slot of the shared page, and reads from the header what the worker is asked to do.

One process writes a slot: the worker, and none of the processes it starts (`current_writer`). It does so when the
script calls `raylaunch.worker`, and on each step of an optimizer (`StepCounter`), by torch's hook for all optimizers,
`torch.optim.optimizer.register_optimizer_step_post_hook`. A method takes a microsecond or two, since scripts call them
on each step. This module never imports torch itself.
"""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns, sleep
from typing import Any

from raylaunch.core.machine.commits import Commit
from raylaunch.worker import torch_internals
from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.import_hook import when_imported
from raylaunch.worker.heartbeats.shared_page import SharedPage, slot_offset

ATTEMPT_VARIABLE = "RAYLAUNCH_ATTEMPT"
"""In a worker's environment: the number of its attempt."""
WITH_SURVIVORS_VARIABLE = "RAYLAUNCH_WITH_SURVIVORS"
"""In a worker's environment: `1` if other workers of its attempt may be processes of the attempt before."""

_POLL_SECONDS = 0.001
"""Between two reads of a step that is proposed, until it is committed or withdrawn."""
_STOP_POLL_SECONDS = 0.02
"""Between two looks at the lease, and at whether the request for a checkpoint still stands."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OPTIMIZERS = "torch.optim.optimizer"
_TAKEOVER_STEPS = 100
"""Steps of another optimizer, with none of the counted one, after which the other one is counted."""
_MAX_READS = 10
"""How often an optimizer's own step count is read, which may have to be copied from its device."""


class HeartbeatWriter:
    """The writer of one slot, in the process that owns it.

    `completed` is always the number of steps that are done by the script's own count.
    """

    def __init__(self, numbers: memoryview, slot: int) -> None:
        self._numbers = numbers
        self._slot = slot
        self.commits = NodeCommits(numbers)
        #: The steps of the checkpoint that the script was told to write and has not reported yet, or 0.
        self.save_in_progress = 0
        #: Whether the script calls `should_checkpoint`; then only that says at which step it is.
        self.script_reports_steps = False
        #: When the script last asked `should_checkpoint`, in ns; 0: it never has, and so saves nothing on request.
        self._asked_at = 0
        self._open_sections = 0
        self._unobservable = False
        self._lock = threading.RLock()  # reentrant: a signal handler may enter a section
        self._progress = numbers[slot + shared_page.PROGRESS]  # not 0 if a program before this one was the worker
        self._progress_at_poll = self._progress_at_heartbeat = self._progress
        self._write_busy()

    def detach(self) -> None:
        """Write into memory of this process from now on. Called in a forked child, because the slot is its parent's."""
        self._numbers = memoryview(bytearray(8 * slot_offset(shared_page.MAX_WORKERS))).cast("q")

    def record_alive(self, *, waits: bool = False) -> None:
        """Record that this process is alive. If the node's lease has expired, kill this process instead.

        `waits`: it waits for other ranks, which is no sign of life: they may have ended.
        """
        numbers = self._numbers
        lease = numbers[shared_page.LEASE_EXPIRES_AT]
        if lease and shared_page.lease_clock() > lease:
            os.kill(os.getpid(), signal.SIGKILL)
        if not waits:
            numbers[self._slot + shared_page.ALIVE_AT] = monotonic_ns()

    def record_progress(self, completed: int = 0) -> None:
        """Record an optimizer step or a heartbeat. `completed` is 0 where the count is not known."""
        self.record_alive()
        numbers = self._numbers
        if completed and not self.script_reports_steps:
            if not numbers[self._slot + shared_page.FIRST_STEP]:
                numbers[self._slot + shared_page.FIRST_STEP] = completed
            numbers[self._slot + shared_page.LAST_STEP] = completed
        if not self._progress:
            numbers[self._slot + shared_page.FIRST_PROGRESS_AT] = numbers[self._slot + shared_page.ALIVE_AT]
        self._progress = progress = self._progress + 1
        numbers[self._slot + shared_page.PROGRESS] = progress

    def record_heartbeat(self) -> None:
        """Record a heartbeat of the script. It is a step of its loop, unless the loop has recorded that step already.

        An optimizer of torch in the same loop records it.
        """
        if self._progress == self._progress_at_heartbeat:
            self.record_progress()
        else:
            self.record_alive()
        self._progress_at_heartbeat = self._progress

    def record_step(self, completed: int) -> None:
        """Record that the script has done `completed` steps, by its own count. It may call this often in a step."""
        is_known = self._numbers[self._slot + shared_page.LAST_STEP] == completed
        if self.script_reports_steps and is_known:
            self.record_alive()
            return
        if not self.script_reports_steps:
            self.script_reports_steps = True
            self._write(shared_page.FIRST_STEP, completed)
        if self._progress == self._progress_at_poll:  # no optimizer of torch steps in this loop
            self.record_progress()
        else:
            self.record_alive()
        self._progress_at_poll = self._progress
        self._write(shared_page.LAST_STEP, completed)

    def should_save(self, completed: int) -> bool:
        """Record that the script has done `completed` steps, and return whether it is to save now."""
        found = self._should_save(completed)
        self._asked_at = monotonic_ns()
        return found

    def should_end(self, completed: int) -> bool:
        """Return whether the script is to end after the commit of this step: never if it saves checkpoints itself."""
        return not self._asked_at and self._should_save(completed)

    def _should_save(self, completed: int) -> bool:
        self.record_step(completed)
        self._write(shared_page.POLLED_STEP, completed)
        if not self.is_save_proposed(completed) or not self.await_commit(completed):
            return False
        self.save_in_progress = completed
        self._write_busy()
        return True

    def is_save_proposed(self, completed: int) -> bool:
        """Return whether this rank has reached the step proposed for a checkpoint."""
        return 0 < self._numbers[shared_page.PROPOSED_STEP] <= completed

    def is_save_committed(self, completed: int) -> bool:
        """Return whether this rank has reached the agreed checkpoint step."""
        numbers = self._numbers
        proposed = numbers[shared_page.PROPOSED_STEP]  # read once: it may change between two reads
        return 0 < proposed <= completed and numbers[shared_page.COMMITTED_STEP] == proposed

    def await_commit(self, completed: int) -> bool:
        """Wait until the proposed step is committed (True), withdrawn, or replaced by a later one (False).

        Another rank may have passed the step, so that takes a message to the driver and back.
        """
        while self.is_save_proposed(completed):
            if self.is_save_committed(completed):
                return True
            self.record_alive()
            sleep(_POLL_SECONDS)
        return False

    def record_saved(self, completed: int) -> None:
        """Record that the checkpoint after `completed` steps is written."""
        is_new = self._numbers[self._slot + shared_page.POLLED_STEP] == completed
        if self._asked_at and is_new:  # else it was written in the background
            self._write(shared_page.SAVE_NS, monotonic_ns() - self._asked_at)
        self._write(shared_page.SAVED_STEP, completed)
        self.save_in_progress = 0
        self._write_busy()
        self.record_alive()

    def wait_for_stop(self, completed: int) -> None:
        """Wait for a signal that ends the script, or until the request for a checkpoint is withdrawn.

        A signal without a handler ends the process. An exception of the script's handler is raised here. After a
        handler that returns, this returns too, because the script then wants to end by itself.
        """
        with _handler_calls_counted() as handler_called, self.ready_to_stop():
            while self.is_save_committed(completed) and not handler_called():
                self.record_alive()
                sleep(_STOP_POLL_SECONDS)

    @contextmanager
    def ready_to_stop(self) -> Iterator[None]:
        """Record that this process is between two steps, with nothing to save: no planned change waits for it."""
        self._write(shared_page.WAITING_FOR_STOP, 1)
        try:
            yield
        finally:
            self._write(shared_page.WAITING_FOR_STOP, 0)

    @property
    def is_ready_to_stop(self) -> bool:
        """Whether this process is between two steps, with nothing to save (`ready_to_stop`)."""
        return bool(self._numbers[self._slot + shared_page.WAITING_FOR_STOP])

    @property
    def attempt(self) -> int:
        """The attempt whose workers have the slots of the page."""
        return self._numbers[shared_page.ATTEMPT]

    def begin_attempt(self) -> None:
        """Go on in the slot, which was cleared, as the worker of another attempt."""
        self.save_in_progress = 0
        self.script_reports_steps = False
        self._progress = self._progress_at_poll = self._progress_at_heartbeat = 0
        self._write(shared_page.OWNER_PID, os.getpid())
        self._write_busy()

    def record_committed(self, completed: int, seconds: float) -> None:
        """Record that the script's `State` has committed after `completed` steps, and how long that took."""
        self.record_alive()
        self._write(shared_page.SAVE_NS, int(seconds * 1e9))
        self._write(shared_page.COMMITTED_STATE, completed)
        if not self.save_in_progress:
            self._write(shared_page.SAVED_STEP, completed)

    def record_commit_rate(self, interval: int, step_seconds: float) -> None:
        """Record after how many steps `State` commits, and the time of a step, from which that follows."""
        self._write(shared_page.STEP_NS, int(step_seconds * 1e9))
        self._write(shared_page.COMMIT_EVERY, interval)

    def change_open_sections(self, by: int) -> None:
        """Record that a section was entered (1) or left (-1). Sections may nest."""
        with self._lock:
            self._open_sections += by
        self._write_busy()
        self.record_alive()

    def set_unobservable(self, unobservable: bool) -> None:
        """Record whether steps happen without a call of our hook, as when a CUDA graph is replayed."""
        if self._unobservable != unobservable:
            self._unobservable = unobservable
            self._write_busy()

    def _write_busy(self) -> None:
        self._write(shared_page.BUSY, self._open_sections + bool(self.save_in_progress) + self._unobservable)

    def _write(self, field: int, value: int) -> None:
        self._numbers[self._slot + field] = value


class NodeCommits:
    """What the node's agent says in the header about commits: which to restore, which to keep, which are copied."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        #: The last attempt in which this process has restored or committed a `State`, which is to be its only one.
        self.attempt_with_state = 0

    def commit_to_restore(self, waiting: Callable[[], None]) -> tuple[Commit, int] | None:
        """Return what `State` restores in this attempt: the commit that the ranks have chosen; None: there is none.

        The number is the size of the world in which the commit was written, and so the number of its parts. The parts
        that this node needs are there when this returns. Waits for the choice, which the first rank of the node
        tells the agent, and meanwhile calls `waiting`.
        """
        numbers = self._numbers
        while numbers[shared_page.RESTORE_DECIDED] != numbers[shared_page.ATTEMPT]:
            waiting()
            sleep(_POLL_SECONDS)
        if not numbers[shared_page.RESTORE_ATTEMPT]:
            return None
        commit = Commit(numbers[shared_page.RESTORE_ATTEMPT], numbers[shared_page.RESTORE_STEPS])
        return commit, numbers[shared_page.RESTORE_WORLD_SIZE]

    def commit_to_keep(self) -> Commit | None:
        """Return the commit that `State` must not overwrite before a newer one is copied; None: there is none."""
        attempt = self._numbers[shared_page.KEPT_ATTEMPT]
        return Commit(attempt, self._numbers[shared_page.KEPT_STEPS]) if attempt else None

    def copied_steps(self) -> int | None:
        """Return how many steps the last commit has that this node has copied to another host; 0: it has copied none.

        None: it makes no copies in this attempt.
        """
        copying = self._numbers[shared_page.COPYING]
        if not copying or copying != self._numbers[shared_page.ATTEMPT]:
            return None
        return self._numbers[shared_page.COPIED_STEPS]

    @property
    def awaits_copy(self) -> bool:
        """Whether what is committed after the proposed step is to be copied to another node, since a node leaves."""
        return bool(self._numbers[shared_page.AWAITS_COPY])


def completed_steps(step: int) -> int:
    """Return how many steps are completed after the step of this number; numbers start at 0.

    Raises TypeError where it is no integer, and ValueError where it is negative or too large.
    """
    if isinstance(step, bool):
        msg = f"`step` is the number of the step that was just done; got {step!r}"
        raise TypeError(msg)
    try:
        number = operator.index(step)
    except TypeError:
        msg = f"`step` is the number of the step that was just done, an int; got {type(step).__name__} {step!r}"
        raise TypeError(msg) from None
    if not 0 <= number < shared_page.MAX_NUMBER:
        msg = f"`step` is the number of the step that was just done, from 0 on; got {number}"
        raise ValueError(msg)
    return number + 1


@contextmanager
def _handler_calls_counted() -> Iterator[Callable[[], bool]]:
    """Wrap the script's signal handlers; the function that is given tells whether one of them was called."""
    called: list[int] = []
    originals = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                originals[number] = handler

    def wrapper(number: int, frame: object) -> None:
        called.append(number)
        originals[signal.Signals(number)](number, frame)  # type: ignore[arg-type]

    for number in originals:
        signal.signal(number, wrapper)
    try:
        yield lambda: bool(called)
    finally:
        for number, handler in originals.items():
            if signal.getsignal(number) is wrapper:  # the handler may have installed another one
                signal.signal(number, handler)


_writers: list[HeartbeatWriter | None] = []
"""The writer of this process, or None if it owns no slot; empty before `claim`."""


def current_writer() -> HeartbeatWriter | None:
    """Return the writer of this process, and claim the slot if that was not tried yet.

    None: outside a launch, and in a process that only inherited a worker's environment.
    """
    if not _writers:
        claim()
    return _writers[0]


def claim() -> None:
    """Take the slot that the environment names, if it has no living owner.

    `boot` calls this in a worker. A `command` may be a shell around the script; there the owner is the first process
    that uses `raylaunch.worker`. Child processes of an owner never own a slot.
    """
    writer = _open_writer() if not _is_child_of_multiprocessing() else None
    _writers[:] = [writer]
    if writer is not None:
        when_imported(_OPTIMIZERS, lambda module: _count_steps(module, writer))


def release() -> None:
    """Give up the slot in this process, as a forked child does; the next use claims it anew."""
    for writer in filter(None, _writers):
        writer.detach()
    _writers.clear()


def wait_instead_of_exiting() -> None:
    """Wait if the script ends with exit code 0 after `should_checkpoint` returned True, without `checkpointed`.

    Such a script has saved, but its training is not finished, as exit code 0 would say.
    """
    writer = current_writer()
    if writer is not None and writer.save_in_progress:
        completed = writer.save_in_progress
        writer.record_saved(completed)
        writer.wait_for_stop(completed)


os.register_at_fork(after_in_child=release)


def _is_child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _open_writer() -> HeartbeatWriter | None:
    path, _, local_rank = os.environ.get(shared_page.PAGE_VARIABLE, "").rpartition(":")
    if not path or not local_rank.isdecimal() or int(local_rank) >= shared_page.MAX_WORKERS:
        return None
    try:
        numbers = SharedPage.open(path).numbers
    except (OSError, ValueError):
        return None
    slot = slot_offset(int(local_rank))
    owner = numbers[slot + shared_page.OWNER_PID]
    if owner not in (0, os.getpid()) and os.path.exists(f"/proc/{owner}"):
        return None
    if os.environ.get(ATTEMPT_VARIABLE, str(numbers[shared_page.ATTEMPT])) != str(numbers[shared_page.ATTEMPT]):
        return None  # a process left over from an earlier attempt
    numbers[slot + shared_page.OWNER_PID] = os.getpid()
    return HeartbeatWriter(numbers, slot)


def _count_steps(module: types.ModuleType, writer: HeartbeatWriter) -> None:
    """Record each optimizer step of this process as progress."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return  # another version of torch, whose steps are not seen
    torch = sys.modules["torch"]
    count = StepCounter(writer).on_step

    def after_step(optimizer: Any, _args: object, _kwargs: object) -> None:
        # torch.compile traces this. A step that is one whole graph must stay one, so it is not counted.
        if torch.compiler.is_compiling() and not _breaks_graph(optimizer):
            return
        count(optimizer)

    register(after_step)


def _breaks_graph(optimizer: Any) -> bool:
    """Return whether torch breaks the graph around this optimizer's step anyway.

    It does so for its own optimizers with the option `differentiable` (`_use_grad_for_differentiable` in
    `torch/optim/optimizer.py`).
    """
    return type(optimizer).__module__.startswith("torch.optim.") and "differentiable" in optimizer.defaults


class StepCounter:
    """Counts the steps of one of the script's optimizers as progress: the first that steps.

    Steps of the others only show that the worker is alive. If the counted optimizer is gone or steps no more, another
    one takes over.
    """

    def __init__(self, writer: HeartbeatWriter) -> None:
        self._writer = writer
        self._counted: weakref.ref[Any] | None = None
        self._other: weakref.ref[Any] | None = None
        self._steps_of_other = 0
        #: Asks the device whether a graph is being captured; None: it has no such graphs.
        self._asks_capturing: Callable[[], bool] | None = None
        self._completed = 0
        self._state_id = 0
        self._reads = 0

    @torch_internals.do_not_compile
    def on_step(self, optimizer: Any) -> None:
        """Record a step of an optimizer. Called after each step of any optimizer."""
        counted = self._counted
        if counted is not None and counted() is optimizer:
            self._steps_of_other = 0
            if self._completed:
                self._completed += 1
        elif not self._takes_over(optimizer):
            self._writer.record_alive()
            return
        if self._asks_capturing is not None and self._is_capturing(self._asks_capturing):
            self._writer.record_alive()
            self._state_id = 0
            return
        state_id = id(optimizer.state)
        if state_id != self._state_id and self._reads < _MAX_READS:  # the first step, or the first of a loaded state
            self._state_id = state_id
            self._reads += 1
            self._completed = _steps_of(optimizer)
        self._writer.record_progress(self._completed)

    def _takes_over(self, optimizer: Any) -> bool:
        """Return whether this optimizer, which was not counted so far, is counted from now on."""
        counted, other = self._counted, self._other
        if counted is not None and counted() is not None:
            if other is None or other() is None:
                self._other, self._steps_of_other = weakref.ref(optimizer), 0
            elif other() is optimizer:
                self._steps_of_other += 1
            if self._steps_of_other < _TAKEOVER_STEPS:
                return False
        self._counted, self._other, self._steps_of_other = weakref.ref(optimizer), None, 0
        self._asks_capturing = None
        for parameter in optimizer.param_groups[0]["params"][:1]:
            module = getattr(sys.modules["torch"], parameter.device.type, None)
            self._asks_capturing = getattr(module, "is_current_stream_capturing", None)
        self._state_id = self._reads = 0
        return True

    def _is_capturing(self, ask: Callable[[], bool]) -> bool:
        """Return whether this step is captured into a graph, as CUDA's: then nothing may be read from the device.

        The graph is replayed later without a call of the hook.
        """
        capturing = bool(ask())
        self._writer.set_unobservable(capturing)
        return capturing


def _steps_of(optimizer: Any) -> int:
    """Return how many steps the optimizer's state says were done in all attempts, or 0 where it does not say.

    Adam and similar optimizers keep the count with each parameter. Some fused optimizers of other libraries keep it
    with the group.
    """
    try:
        first = next(iter(optimizer.state.values()), None) or {}
        step = first.get("step", optimizer.param_groups[0].get("step"))
        if type(step) is sys.modules["torch"].Tensor:
            step = step.item()
        return int(step) if isinstance(step, int | float) and 0 < step < shared_page.MAX_NUMBER else 0
    except Exception:  # noqa: BLE001
        return 0  # a state of another kind, which must not disturb the script
