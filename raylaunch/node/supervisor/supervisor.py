"""The agent's side of the fork server: turns orders for the node into processes, and their ends into node events."""

from __future__ import annotations

import contextlib
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.observe import WorkersStatus
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.newtypes import assert_never
from raylaunch.node.linux import limits
from raylaunch.node.linux.oom import OomKills
from raylaunch.node.protocol import forkserver_messages, node_status, wire
from raylaunch.node.protocol.import_manifest import ImportManifest
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
from raylaunch.node.protocol.node_spec import AgentSpec, NodeSpec
from raylaunch.node.protocol.node_status import SupervisorEvent
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.supervisor import process_failure
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.forkserver_client import ForkServerClient
from raylaunch.node.supervisor.polling import PagePoller, Saved, read_heartbeat, saved_step
from raylaunch.node.supervisor.survivor_table import SurvivorTable
from raylaunch.worker.runtime.spec import Report, WorkerSpec

_MOST_FALSE_STARTS = 3


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
        #: What this agent shares with the fork server and the workers.
        self.page = self.client.page
        own = self.client.complete(spec, address=address, env=env, cwd=cwd)
        self.state = StateMemory(
            self.page, spec.state_secret, spec.state_bytes, self.client.fast_dir, self.client.fd_store
        )
        self._survivors = SurvivorTable()
        self.spec: NodeSpec = replace(own, interface_env=interface_env or {})
        #: Whether the fork server has imported everything and takes orders.
        self.ready = False
        #: What is true of the workers of the newest attempt.
        self.workers = WorkersStatus()
        self.attempt_state: AttemptState | None = None
        self._poller = PagePoller(self.page, spec.node)
        self._epoll = select.epoll()
        self._epoll.register(self._poller, select.EPOLLIN)
        self._epoll.register(self.state, select.EPOLLIN)
        self._epoll.register(self._survivors, select.EPOLLIN)
        self.goal = _ServerGoal()
        self._preload = spec.job.preloaded
        #: Why `_preload` is less than the job's.
        self._why: tuple[str, ...] = ()
        #: Fork servers in a row that died before they were ready.
        self._false_starts = 0
        self._oom_kills = OomKills()
        self._closed = False

    @property
    def manifest(self) -> ImportManifest | None:
        """What the zygote imports ahead of the script, as the fork server last reported."""
        return self.client.manifest

    def start(self) -> None:
        """Start the fork server, unless there is one. `Ready` follows when it has imported everything."""
        if self.client.control is None:
            self.client.start(self.spec, self._preload)
        self._watch_control()
        if self.client.ready is not None:
            self._poller.wake()

    def _watch_control(self) -> None:
        assert self.client.control is not None
        self._epoll.register(self.client.control, select.EPOLLIN)

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
        self.goal.start = None if self.ready else start
        self._send(start)
        self._oom_kills.reset()

    def _send(self, order: forkserver_messages.ForkServerOrder) -> None:
        """Send to the fork server, if it is ready."""
        if self.ready and self.client.control is not None:
            with contextlib.suppress(ConnectionError):  # gone: `poll` finds out and handles that
                wire.send(self.client.control, order)

    def renew_lease(self, until_ns: int) -> None:
        """Let the node's processes live until then, by `lease_clock`. 0: without an end.

        After that time the fork server and the workers end by themselves, even if this process is stopped. A lease that
        has expired cannot be renewed.
        """
        if not self._closed and self.page.renew_lease(until_ns):
            self._send(forkserver_messages.ReadPage())

    def heartbeat(self) -> Heartbeat | None:
        """Return the progress of the present attempt's workers; None where none are started."""
        memory = self.state.usage(self.spec.agent.node)
        return None if self._closed else read_heartbeat(self.page, self.attempt_state, memory)

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
        if not (self.ready and self._preload == self.spec.agent.job.preloaded and client.reset()):
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
        self.client.fast_dir.release()
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
            case forkserver_messages.WorkerExited():
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
                return

    def _begin_serving(self, ready: node_status.Ready) -> node_status.Ready:
        """Tell the fork server all that it should do. None of the workers that should end is there."""
        self.ready = True
        for attempt, port in self.goal.stores.items():
            self._send(self.spec.store(attempt, port))
        if self.goal.start is not None:
            self._send(self.goal.start)
            self.goal.start = None
        for attempt in sorted(self.goal.stopping):
            self._gone(attempt)
        return replace(ready, why=self._why + ready.why)

    def _exited(self, exited: forkserver_messages.WorkerExited, fd: int | None) -> None:
        """Tell of a failure. Those of workers that were told to stop are told when all are gone."""
        report, result = process_failure.report(fd)
        if exited.why:
            report = Report(error_type="OSError", message=exited.why)
        state = self.attempt_state
        is_present = state is not None and exited.attempt == state.attempt
        if state is not None and is_present:
            state.ends[exited.rank] = exited.exit_code
            if result is not None:
                state.results[exited.rank] = result
        elif result is not None:
            result.close()
        if exited.exit_code == 0:
            return
        folder = self.spec.rank_dir(exited.attempt, exited.rank)
        of_gpus = state.gpus.evidence if state is not None and is_present else lambda _: ""
        failure = process_failure.failure(
            exited, report, folder, self._oom_kills, of_gpus=of_gpus, kept=self.spec.agent.kept
        )
        if is_present:  # else the page is of another attempt
            failure = replace(failure, saved=saved_step(self.page, exited.local_rank))
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
        """Start another fork server. Yields what the dead one owed.

        Its workers have died with it, and what they leave is killed first.
        """
        dead = self.client.end_dead_server(is_last=self.page.lease_has_expired)
        self._false_starts = 0 if self.ready else self._false_starts + 1
        self.ready = False
        state = self.attempt_state
        if state is not None and self.goal.start is None:
            stopped = state.attempt in self.goal.stopping or self.page.lease_has_expired
            yield from ((exited, None) for exited in state.exits_with_server(dead, stopped=stopped))
        for attempt in sorted(self.goal.stopping):
            yield forkserver_messages.WorkersGone(attempt=attempt), None
        yield from self._restart_server()

    def _restart_server(self) -> Iterator[tuple[forkserver_messages.ForkServerEvent, int | None]]:
        """Start another fork server, without the preload if the last two died before they were ready.

        After one more that did, and where the lease has expired, start none, and yield a `Ready` without torch.
        """
        died_too_often = self._false_starts >= _MOST_FALSE_STARTS
        last_words = self.client.last_words or "it dies again and again while it imports torch"
        why = f"there is no fork server: {last_words}" if died_too_often else ""
        why = "nothing was heard of the driver for too long" if self.page.lease_has_expired else why
        if self._false_starts > 1 and self._preload:
            self._why = (f"cannot preload {', '.join(self._preload)}: the fork server died of it",)
            self._preload = ()
        try:
            if not why:
                self.start()
                return
        except OSError as error:
            why = f"there is no fork server: {limits.explained(error, 'the agent')}"
        yield node_status.Ready(start_method=StartMethod.SPAWN, why=(why,), torch=False, pid=0), None
