"""Reads what no message tells the supervisor of: progress, a checkpoint that was requested, and stack dumps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raylaunch.core.failures.stacks import Stack
from raylaunch.core.machine.measured import CommitRate, NodeMemory
from raylaunch.core.monitoring.checkpoint_step import may_ask
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import NodeId
from raylaunch.node.linux import procfs
from raylaunch.node.linux.timerfd import TimerFd
from raylaunch.node.protocol.forkserver_messages import StackDumpStarted
from raylaunch.node.protocol.node_goal import CommitCheckpoint, DumpStacks, ProposeCheckpoint
from raylaunch.node.protocol.node_spec import RECORDER_DUMP, RECORDER_PIPE
from raylaunch.node.protocol.node_status import StacksDumped, StepProposed
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.flight_recorder import FlightRecorder
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime.stack_signal import ALL_STACKS_SIGNAL, STACK_SIGNAL

_CHECKPOINT_POLL_SECONDS = 0.01
_QUIET_SECONDS = 1.0
"""A worker with a later sign of life is not stopped, or only just. To look costs a system call for each worker."""

_STACKS_POLL_SECONDS = 0.02
MOST_STACKS_SECONDS = 0.5
MOST_RECORDER_SECONDS = 1.3
"""How long to wait for the Flight Recorder, which looks each second whether it is asked."""
_MOST_BYTES = 64 * 1024
"""Of one worker: the last ones, since faulthandler writes the main thread last."""
_NCCL_THREAD = "pt_nccl_watchdg\n"
"""The name of a thread that each process group of NCCL has (ProcessGroupNCCL.cpp)."""
_STOPPED = ("T", "t", "Z", procfs.GONE)
"""Process states (proc(5)) in which no signal handler runs."""


@dataclass(frozen=True, slots=True)
class Saved:
    """All workers of the node have saved this step, and wait for their end.

    None: some never ask for checkpoints, or all have ended, which was told before.
    """

    attempt: int
    step: int | None


PolledEvent = StacksDumped | StepProposed | Saved


class PagePoller:
    """The checkpoint that is requested of workers, and the stack dumps that they are writing."""

    def __init__(self, page: SharedPage, node: NodeId) -> None:
        self._node = node
        self._timer = TimerFd()
        self.checkpoint = CheckpointPoll(page)
        self._proposed: list[StepProposed] = []
        self.dumps = StackDumps(node)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `poll` is due."""
        return self._timer.fileno()

    def wake(self) -> None:
        """Make the file descriptor readable, so that `poll` is called soon."""
        self._timer.set(0)

    def handle_checkpoint(self, order: ProposeCheckpoint | CommitCheckpoint, state: AttemptState | None) -> None:
        """Propose a step to the present attempt's workers, or have them save at the one that was proposed."""
        if isinstance(order, CommitCheckpoint):
            self.checkpoint.commit(order)
            return
        reached = self.checkpoint.propose(order, state)
        if reached is not None:
            event = StepProposed(node=self._node, attempt=order.attempt, step=order.step, reached=reached)
            self._proposed.append(event)
        self.wake()

    def dump_stacks(self, order: DumpStacks, state: AttemptState | None, recorder: Mapping[str, str]) -> None:
        """Wait for the stacks of the attempt's workers, which the fork server is about to signal.

        `recorder`: see `NodeSpec.recorder`.
        """
        live = state.live() if state is not None and state.attempt == order.attempt else []
        pipe, dump = recorder[RECORDER_PIPE], recorder[RECORDER_DUMP]
        recorders = {rank: FlightRecorder(f"{pipe}{rank}.pipe", f"{dump}{rank}") for _, rank, _ in live}
        self.dumps.start(order.attempt, live, recorders)
        self.wake()

    def poll(self, state: AttemptState | None) -> Iterator[PolledEvent]:
        """Yield what there is by now, and set the timer for the next call."""
        yield from self._proposed
        self._proposed.clear()
        answer = self.checkpoint.poll(state)
        if answer is not None:
            yield answer
        dumped = self.dumps.poll()
        if dumped is not None:
            yield dumped
        if self.checkpoint.is_open:
            self._timer.set(_CHECKPOINT_POLL_SECONDS)
        else:
            self._timer.set(_STACKS_POLL_SECONDS if self.dumps.is_open else None)

    def close(self) -> None:
        """Close the files of stack dumps, and the timer."""
        self.dumps.close()
        self._timer.close()


class CheckpointPoll:
    """Puts a request for a checkpoint on the shared page, at most one at a time, and reads the workers' answers."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self.attempt: int | None = None
        #: Whether the step is on the page. A worker that asks for the first time after the proposal was declined
        #: does not see it, so it must not be waited for.
        self._is_proposed = False
        self._expected = False

    def propose(self, order: ProposeCheckpoint, state: AttemptState | None) -> int | None:
        """Propose a step to workers: they wait at the first step from it on that they ask about.

        Returns the last step that any of them had passed when they could first know, whether or not it has ended since;
        None: they never ask.
        """
        self.attempt = order.attempt
        self._is_proposed = False
        self._expected = order.expected
        if state is None or state.attempt != order.attempt:
            return None
        if self._may_all_ask(state):
            self._is_proposed = True
            self._page.numbers[fields.PROPOSED_STEP] = order.step + 1
        elif not state.finished:
            return None
        return max((self._page.numbers[slot + fields.POLLED_STEP] for slot in _slots(state.forked())), default=0) - 1

    def commit(self, order: CommitCheckpoint) -> None:
        """Make the workers save at the step that was proposed last. An order for another step changes nothing."""
        if self.attempt == order.attempt and self._page.numbers[fields.PROPOSED_STEP] == order.step + 1:
            self._page.numbers[fields.COMMITTED_STEP] = order.step + 1

    def drop(self) -> None:
        """Withdraw the request. Workers that wait for a commit go on; workers that are saving are not disturbed."""
        self.attempt = None
        if self._page.numbers[fields.COMMITTED_STEP] != self._page.numbers[fields.PROPOSED_STEP]:
            self._page.numbers[fields.PROPOSED_STEP] = self._page.numbers[fields.COMMITTED_STEP] = 0

    @property
    def is_open(self) -> bool:
        """Whether there is something to poll for."""
        return self.attempt is not None

    def poll(self, state: AttemptState | None) -> Saved | None:
        """Return the answer once, as soon as all live workers have saved, or as it is known that they never ask."""
        attempt = self.attempt
        if attempt is None:
            return None
        step = None
        if self._is_proposed and state is not None and state.attempt == attempt and self._may_all_ask(state):
            slots = _slots(state.live())
            saved = min(self._page.numbers[slot + fields.SAVED_STEP] for slot in slots)
            is_ready = all(self._page.numbers[slot + fields.WAITING_FOR_STOP] for slot in slots)
            if not is_ready or self._awaits_copy_of(saved):
                return None
            step = saved - 1 if saved else None
        self.attempt = None
        return Saved(attempt, step)

    def _awaits_copy_of(self, saved: int) -> bool:
        """Return whether workers that had saved before, and wait for work, have yet to be copied to another node.

        `saved`: how many steps all of them have saved. Those that save as they are asked to wait for that themselves.
        """
        numbers = self._page.numbers
        is_earlier = saved < numbers[fields.PROPOSED_STEP]
        return is_earlier and bool(numbers[fields.AWAITS_COPY]) and numbers[fields.COPIED_STEPS] < saved

    def _may_all_ask(self, state: AttemptState) -> bool:
        """Return whether there are workers, and each of them has called `should_checkpoint`, or may be about to."""
        slots = _slots(state.live())
        has_slots = bool(slots) and len(state.pids) <= fields.MAX_WORKERS
        numbers = self._page.numbers
        return has_slots and all(
            numbers[slot + fields.POLLED_STEP] or may_ask(numbers[slot + fields.PROGRESS], expected=self._expected)
            for slot in slots
        )


def _slots(workers: Iterable[tuple[int, int, int]]) -> list[int]:
    return [fields.slot_offset(local_rank) for local_rank, _, _ in workers if local_rank < fields.MAX_WORKERS]


def read_heartbeat(page: SharedPage, state: AttemptState | None, memory: NodeMemory) -> Heartbeat | None:
    """Return the progress of all live workers, and once more of each that has ended. None: none are started."""
    if state is None or not state.pids:
        return None
    now, memory = time.monotonic_ns(), replace(memory, gpus=state.gpus.latest)
    marks = [
        _mark(page, local_rank, rank, now, 0 if rank in state.ends else pid)
        for local_rank, rank, pid in state.forked()
        if local_rank < fields.MAX_WORKERS and rank not in state.shown
    ]
    state.shown |= state.ends.keys()
    return Heartbeat(
        attempt=state.attempt,
        marks=tuple(marks),
        memory=memory if memory.own or memory.copies or memory.files or memory.gpus else None,
        copied=page.numbers[fields.COPIED_STEPS] or None,
    )


def _mark(page: SharedPage, local_rank: int, rank: int, now: int, pid: int) -> WorkerProgress:
    """`pid`: the worker's process id; 0: it has ended."""
    numbers, slot = page.numbers, fields.slot_offset(local_rank)
    marked_at, first_at = numbers[slot + fields.ALIVE_AT], numbers[slot + fields.FIRST_PROGRESS_AT]
    is_quiet = now - marked_at > _QUIET_SECONDS * 1e9
    return WorkerProgress(
        rank=rank,
        marks=numbers[slot + fields.PROGRESS],
        age=max(0.0, (now - marked_at) / 1e9) if marked_at else 0.0,
        step=_step(numbers[slot + fields.LAST_STEP]),
        asked=_step(numbers[slot + fields.POLLED_STEP]),
        saved=_step(numbers[slot + fields.SAVED_STEP]),
        busy=numbers[slot + fields.BUSY] > 0,
        stopped=is_quiet and pid > 0 and procfs.is_stopped(pid),
        first_age=max(0.0, (now - first_at) / 1e9) if first_at else None,
        first_step=_step(numbers[slot + fields.FIRST_STEP]),
        committed=numbers[slot + fields.COMMITTED_STATE] or None,
        save_seconds=numbers[slot + fields.SAVE_NS] / 1e9 or None,
        commit_rate=_commit_rate(page, slot),
    )


def saved_step(page: SharedPage, local_rank: int) -> int | None:
    """Return the last step that a worker has saved in the attempt, by `checkpointed` or a commit of `State`."""
    if local_rank >= fields.MAX_WORKERS:
        return None
    slot = fields.slot_offset(local_rank)
    return _step(max(page.numbers[slot + fields.SAVED_STEP], page.numbers[slot + fields.COMMITTED_STATE]))


def _commit_rate(page: SharedPage, slot: int) -> CommitRate | None:
    numbers = page.numbers
    every = numbers[slot + fields.COMMIT_EVERY]
    if not every:
        return None
    commit, step = numbers[slot + fields.SAVE_NS], numbers[slot + fields.STEP_NS]
    return CommitRate(every=every, commit_seconds=commit / 1e9, step_seconds=step / 1e9)


def _step(number: int) -> int | None:
    """Decode a step, which the page holds plus one, so that 0 means none."""
    return number - 1 if number else None


@dataclass(slots=True)
class PendingDump:
    """One worker's dump. `fd` is its file, once the fork server has signalled it; -1 before."""

    rank: int
    pid: int
    recorder: FlightRecorder
    fd: int = -1
    start: int = 0
    size: int = 0
    is_signalled: bool = True
    is_closed: bool = False
    done: bool = False

    def poll(self) -> None:
        """Find out whether the dump is complete: it has not grown since the last call, and the handler has returned.

        The Flight Recorder is not waited for here.
        """
        if not self.is_signalled or procfs.process_state(self.pid) in _STOPPED:
            self.done = True
        elif self.fd >= 0:
            before, self.size = self.size, os.fstat(self.fd).st_size
            is_in_handler = any(procfs.blocks(self.pid, number) for number in (STACK_SIGNAL, ALL_STACKS_SIGNAL))
            self.done = self.start < self.size == before and not is_in_handler

    def stack(self) -> Stack:
        return Stack(
            rank=self.rank,
            state=procfs.process_state(self.pid),
            text=self._text(),
            effort=procfs.resource_usage(self.pid),
            child_stopped=procfs.has_stopped_child(self.pid),
            file_closed=self.is_closed,
            has_nccl=_has_nccl(self.pid),
            calls=self.recorder.calls or (),
        )

    def _text(self) -> str:
        if self.fd < 0:
            return ""
        size = os.fstat(self.fd).st_size
        start = max(self.start, size - _MOST_BYTES)
        return os.pread(self.fd, size - start, start).decode(errors="replace")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StackDumps:
    """At most one dump of all workers at a time."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._attempt: int | None = None
        self._dumps: dict[int, PendingDump] = {}
        self._until = self._recorded_until = 0.0
        self._poll_at = 0.0

    def start(
        self, attempt: int, live: Sequence[tuple[int, int, int]], recorders: Mapping[int, FlightRecorder]
    ) -> None:
        """Expect dumps of these workers: (local rank, rank, process id). `poll` returns them."""
        self.close()
        self._attempt = attempt
        self._dumps = {rank: PendingDump(rank, pid, recorders[rank]) for _, rank, pid in live}
        self._poll_at = time.monotonic()
        self._until = self._poll_at + MOST_STACKS_SECONDS
        self._recorded_until = self._poll_at + MOST_RECORDER_SECONDS

    def add_file(self, event: StackDumpStarted, fd: int | None) -> None:
        """Take over the file into which a worker was told to write."""
        if fd is None:
            return
        dump = self._dumps.get(event.rank)
        if dump is None or event.attempt != self._attempt or dump.fd >= 0:
            os.close(fd)
            return
        dump.fd, dump.start = fd, event.start
        dump.is_signalled, dump.is_closed = event.is_signalled, event.is_closed

    @property
    def is_open(self) -> bool:
        """Whether there is something to poll for."""
        return self._attempt is not None

    def poll(self) -> StacksDumped | None:
        """Return all stacks once: when all dumps are complete, or after half a second; with NCCL, after 1.3 s."""
        attempt, now = self._attempt, time.monotonic()
        if attempt is None or now < self._poll_at:
            return None
        self._poll_at = now + _STACKS_POLL_SECONDS
        for dump in self._dumps.values():
            dump.poll()
        if now < self._until and not all(dump.done for dump in self._dumps.values()):
            return None
        if now < self._recorded_until and not all(dump.recorder.poll() for dump in self._dumps.values()):
            return None
        stacks = tuple(dump.stack() for dump in self._dumps.values())
        self.close()
        return StacksDumped(node=self._node, attempt=attempt, stacks=stacks)

    def close(self) -> None:
        """Close all files, and expect nothing more."""
        for dump in self._dumps.values():
            dump.close()
        self._attempt, self._dumps = None, {}


def _has_nccl(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(Path(task.path, "comm").read_text() == _NCCL_THREAD for task in os.scandir(f"/proc/{pid}/task"))
    return False
