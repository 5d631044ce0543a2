"""The agent's side of the fork server: turns orders for the node into processes, and their ends into node events.

What no message tells, a `PagePoller` looks for: the workers' progress and checkpoints on the shared page, and their
stacks.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.measured import CommitRate, NodeMemory
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from raylaunch.core.monitoring.checkpoint_step import may_ask
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import NodeId, assert_never
from raylaunch.node.linux import limits, procfs
from raylaunch.node.linux.timerfd import TimerFd
from raylaunch.node.protocol import forkserver_messages, node_status, wire
from raylaunch.node.protocol.node_goal import (
    CommitCheckpoint,
    DumpStacks,
    LaunchWorkers,
    OpenStore,
    ProposeCheckpoint,
    SignalWorkers,
    StopWorkers,
    WorkerOrder,
)
from raylaunch.node.protocol.node_spec import RECORDER_DUMP, RECORDER_PIPE, AgentSpec, NodeSpec
from raylaunch.node.protocol.node_status import StacksDumped, StepProposed, SupervisorEvent
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.supervisor import process_failure
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.forkserver_client import ForkServerClient
from raylaunch.node.supervisor.process_failure import OomKills
from raylaunch.node.supervisor.stack_dumps import STACKS_POLL_SECONDS, FlightRecorder, StackDumps
from raylaunch.node.supervisor.survivor_table import SurvivorTable
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime.spec import WorkerSpec

_MOST_FALSE_STARTS = 3
_CHECKPOINT_POLL_SECONDS = 0.01
_QUIET_SECONDS = 1.0
"""A worker with a later sign of life is not stopped, or only just. To look costs a system call for each worker."""


@dataclass(slots=True)
class _ServerGoal:
    """What the fork server should do, and has not done: another one is told so, if this one dies."""

    stores: dict[int, int] = field(default_factory=dict)
    """Ports of the stores that should be open, by attempt; 0: any, it is not open yet."""
    start: forkserver_messages.StartWorkers | None = None
    """The workers that no fork server was told to start yet."""
    stopping: set[int] = field(default_factory=set)
    """Attempts that should end and are not gone yet."""

    def stop(self, attempt: int) -> None:
        """End an attempt, which may not have begun."""
        self.stopping.add(attempt)
        if self.start is not None and self.start.attempt == attempt:
            self.start = None


@dataclass(slots=True)
class _ServerStarts:
    """How the starts of fork servers go. Two in a row that die before they are ready may have died of the preload."""

    preload: tuple[str, ...]
    """What the next fork server imports ahead."""
    ready: bool = False
    """Whether the fork server has imported everything and takes orders."""
    why: tuple[str, ...] = ()
    """Why `preload` is less than the job's."""
    false_starts: int = 0
    """Fork servers in a row that died before they were ready."""

    def died(self) -> None:
        """Record that the fork server has died."""
        self.false_starts = 0 if self.ready else self.false_starts + 1
        self.ready = False
        if self.false_starts > 1 and self.preload:
            self.why = (f"cannot preload {', '.join(self.preload)}: the fork server died of it",)
            self.preload = ()

    @property
    def died_too_often(self) -> bool:
        """Whether another start is of no use, even without the preload."""
        return self.false_starts >= _MOST_FALSE_STARTS


class Supervisor:
    """One node's processes. Never blocks: its owner waits until `fileno()` is readable, and then calls `poll`.

    Not thread-safe.
    """

    def __init__(
        self,
        spec: AgentSpec,
        *,
        address: str,
        env: dict[str, str],
        interface_env: dict[str, str] | None = None,
        cwd: str,
        client: ForkServerClient | None = None,
    ) -> None:
        """`interface_env`: more variables for workers of a world of several hosts.

        `client`: from an earlier run with equal per-process fields, whose fork server is active again.
        """
        self.client = ForkServerClient(env, kept=spec.kept) if client is None else client
        more = interface_env or {}
        self.spec: NodeSpec = self.client.complete(spec, address=address, env=env, interface_env=more, cwd=cwd)
        self.state = StateMemory(
            self.client.page, spec.state_secret, spec.state_bytes, self.client.ram_folder, self.client.fd_store
        )
        self._survivors = SurvivorTable()
        #: What is true of the workers of the newest attempt.
        self.workers = WorkersStatus()
        self.attempt_state: AttemptState | None = None
        self._poller = PagePoller(self.client.page, spec.node)
        self._epoll = select.epoll()
        self._epoll.register(self._poller, select.EPOLLIN)
        self._epoll.register(self.state, select.EPOLLIN)
        self._epoll.register(self._survivors, select.EPOLLIN)
        self.goal = _ServerGoal()
        self._starts = _ServerStarts(spec.job.preloaded)
        self._oom_kills = OomKills()
        self._closed = False

    def start(self) -> None:
        """Start the fork server, unless there is one. `Ready` follows when it has imported everything."""
        if self.client.control is None:
            self.client.start(self.spec, self._starts.preload)
        assert self.client.control is not None
        self._epoll.register(self.client.control, select.EPOLLIN)
        if self.client.ready is not None:
            self._poller.wake()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `poll` has something. It outlives fork servers."""
        return self._epoll.fileno()

    # Orders.

    def handle(self, order: WorkerOrder) -> None:
        """Carry out one order. Returns at once; what comes of it is an event that `poll` returns.

        Raises ValueError for a signal that does not exist, and for an attempt whose number the page cannot hold.
        """
        match order:
            case LaunchWorkers():
                self.launch(order, self.spec.workers(order))
            case StopWorkers() | SignalWorkers() if order.signal not in signal.Signals.__members__:
                msg = f"there is no signal {order.signal!r}"
                raise ValueError(msg)
            case StopWorkers():
                self._poller.checkpoint.drop()
                self.goal.stop(order.attempt)
                self._send(order)
            case SignalWorkers():
                self._send(order)
            case DumpStacks():
                self._poller.dump_stacks(order, self.attempt_state, self.spec.recorder(order.attempt))
                self._send(order)
            case OpenStore():
                self.goal.stores[order.attempt] = 0
                self._send(self.spec.store(order.attempt, port=0))
            case ProposeCheckpoint() | CommitCheckpoint():
                self._poller.handle_checkpoint(order, self.attempt_state)
            case _:
                assert_never(order)

    def launch(self, order: LaunchWorkers, workers: tuple[WorkerSpec, ...]) -> None:
        """Carry out this order with these specifications of workers, instead of the node's own."""
        assignment, workers = order.assignment, tuple(map(self._survivors.invited, workers))
        start = forkserver_messages.StartWorkers(attempt=order.attempt, workers=workers)
        if order.staying and self.attempt_state is not None:
            start = self._survivors.rejoin(start, self.attempt_state, self.state.file_to_complete)
        self._poller.checkpoint.drop()
        if self.attempt_state is not None:
            self.attempt_state.close()
        self.attempt_state = AttemptState(assignment, workers)
        self.goal.start = None if self._starts.ready else start
        self._send(start)
        self._oom_kills.reset()

    def _send(self, order: forkserver_messages.ForkServerOrder) -> None:
        """Send to the fork server, if it is ready."""
        if self._starts.ready and self.client.control is not None:
            with contextlib.suppress(ConnectionError):  # gone: `poll` finds out and handles that
                wire.send(self.client.control, order)

    def renew_lease(self, until_ns: int) -> None:
        """Let the node's processes live until then, by `lease_clock`. 0: without an end.

        After that time the fork server and the workers end by themselves, even if this process is stopped. A lease that
        has expired cannot be renewed.
        """
        if not self._closed and self.client.page.renew_lease(until_ns):
            self._send(forkserver_messages.ReadPage())

    def heartbeat(self) -> Heartbeat | None:
        """Return the progress of the present attempt's workers; None where none are started."""
        memory = self.state.usage(self.spec.agent.node)
        return None if self._closed else read_heartbeat(self.client.page, self.attempt_state, memory)

    def read_result(self, rank: int, offset: int) -> bytes:
        """Return a part of what the function of a rank returned or raised in the present attempt, pickled.

        See `ResultFile.read`. Empty if it returned nothing: it has not ended, or left without a word.
        """
        result = self.attempt_state.results.get(rank) if self.attempt_state is not None else None
        return result.read(offset) if result is not None else b""

    # The end.

    def release_client(self) -> ForkServerClient | None:
        """End the run, but keep the fork server for the next one. None: nothing could be kept, all has ended.

        Waits for the end of the run's processes, for seconds at most.
        """
        client = self.client
        if not (self._starts.ready and self._starts.preload == self.spec.agent.job.preloaded and client.reset()):
            self.close()
            return None
        self._closed = True
        self._close_files()
        return client

    def close(self) -> None:
        """End the fork server and all that it started, for seconds at most."""
        if self._closed:
            return
        self._closed = True
        self.client.ram_folder.release()
        self.client.end_server()
        self._close_files()
        self.client.close()

    def _close_files(self) -> None:
        if self.attempt_state is not None:
            self.attempt_state.close()
            self.attempt_state = None
        for each in (self._oom_kills, self._epoll, self._poller, self._survivors):
            each.close()
        self.state.close()

    # Events.

    def poll(self) -> list[SupervisorEvent]:
        """Return everything that has happened since the last call."""
        before = self.workers
        found: list[SupervisorEvent] = []
        for message, fd in self._receive():
            if (event := self._event_of(message, fd)) is not None:
                found.append(event)
        state = self.attempt_state
        if state is not None and state.take_finished():
            self._tell(state.attempt, succeeded=True)
        for polled in self._poller.poll(state):
            if not isinstance(polled, Saved):
                found.append(polled)
            elif state is not None and polled.attempt == state.attempt:
                self._tell(polled.attempt, has_saved=True, saved=polled.step)
        self.state.poll()
        if self._survivors.poll(state, self._send) and state is not None:
            self._tell(state.attempt, can_stay=True)
        return found if self.workers == before else [*found, self.workers]

    def _event_of(self, message: forkserver_messages.ForkServerEvent, fd: int | None) -> SupervisorEvent | None:
        """Return what the agent is told of a message; None: nothing, or it is in `workers`."""
        match message:
            case WorkerExit():
                self._exited(message, fd)
            case forkserver_messages.WorkersForked():
                self._forked(message)
            case forkserver_messages.WorkersGone():
                self._gone(message.attempt)
            case forkserver_messages.StackDumpStarted():
                self._poller.dumps.add_file(message, fd)
            case node_status.Ready():
                return self._begin_serving(message)
            case node_status.StoreOpened():
                self.goal.stores[message.attempt] = message.port
                return message
            case node_status.ManifestChanged():
                return replace(message, manifest=None)
            case _:
                pass  # it is the client's
        return None

    def _tell(self, attempt: int, **changes: Any) -> None:
        """Something is true of the workers of an attempt. Nobody asks about an attempt before the newest."""
        if attempt >= self.workers.attempt:
            newest = self.workers if attempt == self.workers.attempt else WorkersStatus(attempt=attempt)
            self.workers = replace(newest, **changes)

    def _receive(self) -> Iterator[tuple[forkserver_messages.ForkServerEvent, int | None]]:
        activated, self.client.ready = self.client.ready, None
        if activated is not None:
            yield activated, None
        while (control := self.client.control) is not None and wire.is_readable(control):
            try:
                yield self.client.receive()
            except (EOFError, ConnectionError):
                yield from self._server_died()
        if (dying := self.client.dying) is not None and wire.is_readable(dying):
            yield from self._server_ended()

    def _begin_serving(self, ready: node_status.Ready) -> node_status.Ready:
        """Tell the fork server all that it should do. None of the workers that should end is there."""
        self._starts.ready = True
        for attempt, port in self.goal.stores.items():
            self._send(self.spec.store(attempt, port))
        if self.goal.start is not None:
            self._send(self.goal.start)
            self.goal.start = None
        for attempt in sorted(self.goal.stopping):
            self._gone(attempt)
        return replace(ready, why=self._starts.why + ready.why)

    def _exited(self, exited: WorkerExit, fd: int | None) -> None:
        """Tell of a failure. Those of workers that were told to stop are told when all are gone."""
        reported, result = process_failure.report(fd)
        exited = replace(exited, error=exited.error or reported)
        state = self.attempt_state
        is_present = state is not None and exited.attempt == state.attempt
        is_well = exited.exit_code == 0
        if state is not None and is_present:
            may_leave = exited.stopped or not state.workers[exited.local_rank].must_return
            is_well = is_well and (may_leave or result is not None)
            state.ends[exited.rank] = is_well
            if result is not None:
                state.results[exited.rank] = result
        elif result is not None:
            result.close()
        if is_well:
            return
        folder = self.spec.rank_dir(exited.attempt, exited.rank)
        of_gpus = state.gpus.evidence if state is not None and is_present else lambda _: ""
        failure = process_failure.failure(exited, folder, self._oom_kills, of_gpus=of_gpus, kept=self.spec.agent.kept)
        if is_present:  # else the page is of another attempt
            failure = replace(failure, saved=saved_step(self.client.page, exited.local_rank))
        if not exited.stopped:
            before = self.workers.failures if exited.attempt == self.workers.attempt else ()
            self._tell(exited.attempt, failures=(*before, failure))
        elif state is not None and is_present:
            state.late_failures.append(failure)

    def _forked(self, event: forkserver_messages.WorkersForked) -> None:
        state = self.attempt_state
        if state is not None and state.attempt == event.attempt:
            state.pids = event.pids
            self.state.is_final = True
        self.goal.stores = {key: port for key, port in self.goal.stores.items() if key >= event.attempt}
        self._tell(event.attempt, pids=event.pids, timings=event.timings, stayed=event.stayed)

    def _gone(self, attempt: int) -> None:
        self.goal.stopping.discard(attempt)
        state = self.attempt_state
        is_present = state is not None and state.attempt == attempt
        self._tell(attempt, stopped=state.take_late_failures() if state is not None and is_present else ())

    # The fork server's death.

    def _server_died(self) -> Iterator[tuple[forkserver_messages.ForkServerEvent, int | None]]:
        """Yield the exits of its workers, which die with it. How long it takes until they have ended is not known."""
        dead = self.client.server_died()
        assert self.client.dying is not None
        self._epoll.register(self.client.dying, select.EPOLLIN)
        self._starts.died()
        state = self.attempt_state
        if state is not None and self.goal.start is None:
            stopped = state.attempt in self.goal.stopping or self.client.page.lease_has_expired
            yield from ((exited, None) for exited in state.exits_with_server(dead, stopped=stopped))

    def _server_ended(self) -> Iterator[tuple[forkserver_messages.ForkServerEvent, int | None]]:
        """Start another fork server in the place of one of which nothing is left. Yields what the dead one owed."""
        assert self.client.dying is not None
        self._epoll.unregister(self.client.dying)
        self.client.end_dead_server(is_last=self.client.page.lease_has_expired)
        for attempt in sorted(self.goal.stopping):
            yield forkserver_messages.WorkersGone(attempt=attempt), None
        yield from self._restart_server()

    def _restart_server(self) -> Iterator[tuple[forkserver_messages.ForkServerEvent, int | None]]:
        """Start another fork server, without the preload if the last two died before they were ready.

        After one more that did, and where the lease has expired, start none, and yield a `Ready` without torch.
        """
        last_words = self.client.last_words or "it dies again and again while it imports torch"
        why = f"there is no fork server: {last_words}" if self._starts.died_too_often else ""
        why = "nothing was heard of the driver for too long" if self.client.page.lease_has_expired else why
        try:
            if not why:
                self.start()
                return
        except OSError as error:
            why = f"there is no fork server: {limits.explained(error, 'the agent')}"
        yield node_status.Ready(start_method=StartMethod.SPAWN, why=(why,), torch=False, pid=0), None


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
        faults = {rank: state.gpus.evidence(rank) for _, rank, _ in live if state is not None and rank in order.in_full}
        self.dumps.start(order.attempt, live, recorders, faults)
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
            self._timer.set(STACKS_POLL_SECONDS if self.dumps.is_open else None)

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
