"""The driver: the shell around the core's machine. It takes events, has the machine decide, acts, and records both."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raylaunch.cluster import fleet_api as fleets
from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.copy_ring import KnownCopies
from raylaunch.cluster.driver.driver_ledger import DriverLedger
from raylaunch.cluster.driver.executor import Executor, port_in_use
from raylaunch.cluster.driver.node_registry import AgentLinks, NodeRegistry
from raylaunch.cluster.driver.node_warnings import NodeWarnings
from raylaunch.cluster.driver.observer import Observer, RunRecord
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor, tracker_of
from raylaunch.cluster.fleet_api import AgentLost, Fleet, FleetFailed, HostDraining, ReportReceived, SlotGranted
from raylaunch.cluster.probes.peer_check import PeerCheck
from raylaunch.core.job.job import Job
from raylaunch.core.machine.commits import RestoreCommit
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Finish,
    ForwardRequested,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    ReportUnsaved,
    RequestCheckpoint,
    StopRequested,
    Tick,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.observe import observe
from raylaunch.core.machine.state import Done, Phase
from raylaunch.core.newtypes import HostId, NodeId, RunTime, SignalName
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import ClusterError
from raylaunch.node.linux import processes
from raylaunch.node.protocol.messages import StacksDumped, StoreOpened
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus
from raylaunch.node.protocol.terminal_messages import TerminalInput


@dataclass(frozen=True, slots=True, eq=False)
class LoopCall:
    """Work that another thread wants done in the thread of `Driver.run`."""

    work: Callable[[RunTime], Iterable[Event]]
    """Gets the time of the run, and yields events for the machine."""
    answer: Future[Any]
    """Awaited by the other thread, and cancelled if the run ends before."""


Item = fleets.Item | LinkDown | LoopCall


class Driver:
    """One run. Whatever changes the machine comes through the inbox, or with time.

    `run` is called in one thread; `signalled`, `call` and the fleet's reports may come from any.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        fleet: Fleet,
        journal: RunRecord,
        observer: Observer,
        began: float,
        links: AgentLinks | None = None,
        ledger: DriverLedger | None = None,
    ) -> None:
        """`began`: the time.monotonic() of the run's beginning, from which times in events are counted.

        `ledger`: of the driver with whose run this one goes on.
        """
        self.machine = Machine(job, ledger.run if ledger is not None else None)
        self._fleet = fleet
        self._journal = journal
        self._observer = observer
        self._began = began
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.nodes = NodeRegistry(job.node_timeout, links)
        tracker = tracker_of(job, calls_should_checkpoint=ledger is not None and ledger.calls_should_checkpoint)
        self.monitor = ProgressMonitor(tracker, fleet, self._write_stacks, observer.on_message)
        self._peers = PeerCheck(self.machine, fleet.send)
        copies = ledger.copies if ledger is not None else KnownCopies()
        self._executor = Executor(self.machine, run_id, fleet, self.monitor, self.nodes.give_up, copies)
        #: Gets the stacks of the workers of each node, in the thread of `run`.
        self.on_stacks: Callable[[StacksDumped], None] = lambda _: None
        self._draining: dict[HostId, HostDraining] = {}
        #: What each node has told last.
        self._statuses: dict[NodeId, NodeStatus] = {}
        self._warnings = NodeWarnings(observer.on_message, ledger.warned if ledger is not None else ())
        self._wake_at = float("inf")  # when `_stepped` is to be called at the latest

    def signalled(self, signal: SignalName) -> None:
        """Take a signal. Any thread and any signal handler may call this: the signal is only enqueued."""
        asked = ForwardRequested if signal in self.machine.job.signals_to_forward else StopRequested
        self.call(lambda at: [asked(at=at, signal=signal)], Future())

    def call(self, work: Callable[[RunTime], Iterable[Event]], answer: Future[Any]) -> None:
        """Enqueue work for the thread of `run`; see `LoopCall`. Any thread and any signal handler may call this."""
        self._inbox.put(LoopCall(work, answer))

    def typed(self, keys: TerminalInput) -> None:
        """Pass on what a person has typed. Any thread may call this. The node of the rank with the terminal uses it."""
        with contextlib.suppress(RuntimeError):  # the fleet is closed
            for node in self.machine.roster:
                self._fleet.send(node, keys)

    def run(self) -> Finish:
        """Run until the machine is done. The caller closes the fleet.

        Raises ClusterError if the run cannot go on: no torch on a node, `master_port` in use, the head lost.
        """
        self._begin()
        try:
            while self.machine.phase is not Phase.DONE:
                for item in self._next_items():
                    for event in self._events(item):
                        self._step(event)
                for event in self._due_events():
                    self._step(event)
                self._stepped()
        finally:
            for item in [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]:
                if isinstance(item, LoopCall):
                    item.answer.cancel()
        assert isinstance(self.machine.state, Done)
        return Finish(exit_code=self.machine.state.exit_code, why=self.machine.status)

    def _begin(self) -> None:
        self._record([(None, self._perform(self.machine.start()))])
        self.nodes.start(self._inbox.put)
        self._fleet.start(self._tell)
        processes.release_memory()  # the agents take seconds to start, and afterwards this process mostly waits

    def _stepped(self) -> None:
        """Hook: called after each batch of items."""

    def _tell(self, item: fleets.Item) -> None:
        """Enqueue an item of the fleet, in its thread, so that a node counts as heard of while the driver is busy."""
        if isinstance(item, ReportReceived):
            self.nodes.heard(item.node, item.at)
        self._inbox.put(item)

    def _now(self) -> RunTime:
        return self._run_time(time.monotonic())

    def _run_time(self, at: float) -> RunTime:
        """Convert a time.monotonic() of this process."""
        return RunTime(at - self._began)

    def _next_items(self) -> Iterator[Item]:
        """Yield all items that wait, or the first one to arrive; none if something is due before.

        All of them, since this process may have stood still: no deadline is enforced before what arrived in time is
        handled.
        """
        checks = (self._peers.next_check, self._run_time(self.nodes.next_check))
        training = (self.monitor.next_check,) if self._is_training() else ()
        nearest = min(self._executor.wake_at, self._wake_at, *checks, *training)
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=None if nearest == float("inf") else max(0.0, nearest - self._now()))
            for _ in range(self._inbox.qsize()):
                if self.machine.phase is Phase.DONE:
                    return
                yield self._inbox.get_nowait()

    def _step(self, event: Event) -> None:
        """Let the machine handle an event. Act first, then record: no restart waits for the disk."""
        if self._peers.holds(event, self._now()):
            return
        before = self.monitor.progress(event.at) if self.machine.needs_progress(event) else ()
        self._record([(each, self._perform(self.machine.handle(each))) for each in (*before, event)])

    def _perform(self, actions: list[Action]) -> tuple[Action, ...]:
        self._executor.perform(actions, self._now())
        if any(isinstance(action, Launch) for action in actions):
            self._peers.launched(self._now())
        return tuple(actions)

    def _record(self, steps: Iterable[tuple[Event | None, tuple[Action, ...]]]) -> None:
        for event, actions in steps:
            entry = JournalEntry(event=event, actions=actions)
            if isinstance(event, Progressed):
                self._peers.progressed(event)
            self._journal.append(entry)
            self._observer.on_entry(entry, self.machine)
            if any(isinstance(action, ReportUnsaved) for action in actions) and (text := self._executor.unsaved()):
                self._observer.on_message(text)
            for action in actions:
                if isinstance(action, RestoreCommit) and (action.commit is None or action.lost_steps):
                    self._observer.on_message(action.why)
                if isinstance(action, RequestCheckpoint):
                    self._observer.on_message(self._saving(action.why))

    def _saving(self, why: str) -> str:
        """Return what the workers do before a planned change, for a person."""
        if self.monitor.can_save:
            return f"requesting a checkpoint: {why}"
        return f"{why}; the workers have not called `should_checkpoint`, and are stopped without a checkpoint"

    def _write_stacks(self, attempt: int, text: str) -> None:
        if where := self._journal.write_stacks(attempt, text):
            self._observer.on_message(f"what all workers were doing is in {where}")

    # What is due.

    def _due_events(self) -> Iterator[Event]:
        if self.machine.phase is Phase.DONE:
            return
        for gone in self.nodes.silent(time.monotonic()):
            yield from self._node_lost(gone)
        now = self._now()
        if now >= self._executor.wake_at:
            self._executor.wake_at = float("inf")
            yield Tick(at=now)
        if self._is_training():
            yield from self.monitor.due_events(now)
        yield from self._peers.due_events(now)

    def _is_training(self) -> bool:
        """Return whether workers make steps, so that their progress is followed."""
        return self.machine.phase in (Phase.RUNNING, Phase.SAVING)

    # From the fleet's reports to events.

    def _events(self, item: Item) -> Iterator[Event]:
        match item:
            case LoopCall():
                yield from item.work(self._now())
            case HostDraining():
                yield from self._host_draining(item)
            case FleetFailed():
                raise item.error
            case fleets.AgentAdopted() | fleets.AgentsAdopted():
                return  # after a takeover, which `DetachedDriver` knows of
            case _ if self.nodes.is_lost(item.node):
                return  # a report that was on its way when the node was given up
            case _:
                yield from self._of_node(item)

    def _of_node(self, item: SlotGranted | AgentLost | LinkDown | ReportReceived) -> Iterator[Event]:
        match item:
            case SlotGranted():
                yield NodeGranted(at=self._now(), node=item.node, address=item.address)
            case AgentLost():
                if not self.nodes.must_be_proved(item):
                    yield from self._node_lost(item)
            case LinkDown():
                yield from self._node_lost(self.nodes.link_down(item.node))
            case ReportReceived():
                yield from self._report(item)

    def _node_lost(self, gone: AgentLost) -> Iterator[Event]:
        if self._executor.copies.asks_subreaper(gone, self._inbox.put):
            return  # the loss comes again with the answer
        self.nodes.give_up(gone.node)
        self._statuses.pop(gone.node, None)
        yield NodeLost(at=self._now(), node=gone.node, why=gone.why, held=gone.held or ())
        if self.machine.phase is not Phase.DONE:
            self._fleet.replace(gone)

    def _host_draining(self, item: HostDraining) -> Iterator[Event]:
        self._draining[item.host] = item
        if item.ours:
            self._observer.on_message("the host that this command runs on is being drained: with it the run ends")
        for node in self.nodes.on_host(item.host):
            yield self._node_draining(node, item)

    def _node_draining(self, node: NodeId, item: HostDraining) -> NodeDraining:
        return NodeDraining(at=self._now(), node=node, deadline=self._run_time(item.deadline), why=item.why)

    def _report(self, item: ReportReceived) -> Iterator[Event]:
        if item.report.output:
            self._observer.on_output(item.report.output)
        if item.report.heartbeat is not None:
            self.monitor.heartbeat(item.report.heartbeat, self._now())
            if (sample := self.monitor.sample(self._now())) is not None:
                self._observer.on_progress(sample)
        for stacks in item.report.stacks:
            self.monitor.stacks(stacks)
            self._peers.stacks(stacks)
            self.on_stacks(stacks)
        if item.report.status is not None:
            yield from self._status_changed(item, item.report.status)

    def _status_changed(self, item: ReportReceived, new: NodeStatus) -> Iterator[Event]:
        """Do what follows from all that is new in a node's status."""
        node, old = item.node, self._statuses.get(item.node, NodeStatus())
        if new.generation <= old.generation:
            return
        self._statuses[node] = new
        if new.up is not None and new.up != old.up:
            yield from self._came_up(item, new.up)
        for store in new.stores:
            if store.generation > old.generation:
                yield from self._store_opened(node, store.opened)
        for event in observe(node, old.workers, new.workers, now=self._now(), sent_at=item.report.sent_at):
            if isinstance(event, WorkersStarted):
                self.monitor.started(event)
            yield event
        self._answered(node, old, new)

    def _answered(self, node: NodeId, old: NodeStatus, new: NodeStatus) -> None:
        if new.listening is not None and new.listening != old.listening:
            self._peers.listening(node, new.listening)
        if new.probed is not None and new.probed != old.probed:
            self._peers.probed(node, new.probed)
        if new.copies is not None and new.copies != old.copies:
            self._executor.copies.served(node, new.copies)
        if new.proposed is not None and new.proposed != old.proposed:
            self._executor.answered(new.proposed)
        for warning in new.warnings:
            self._warnings.warn(warning)

    def _came_up(self, item: ReportReceived, up: AgentReady) -> Iterator[Event]:
        node = item.node
        for why in up.ready.why:
            self._warnings.warn(f"{node}: {why}")
        if not up.ready.torch and node in self.machine.nodes:
            yield from self._reject(node, "no worker can be started there any more")
            return
        if not up.ready.torch:
            why = "torch cannot be imported" if up.ready.pid else "its fork server cannot be started"
            msg = f"no worker can be started on {up.address}, since {why} there"
            raise ClusterError(msg, hint="; ".join(up.ready.why))
        if node in self.machine.nodes:
            return  # only its fork server was started anew
        if not self._fleet.joined(node, up.host):
            self.nodes.give_up(node)
            yield NodeLost(at=self._now(), node=node, why="it is not needed")
            return
        self.nodes.came_up(node, up.host, item.at)
        hosts = {member.host for member in self.machine.nodes.values()}
        self._warnings.came_up(up, several_hosts=bool(hosts - {up.host}), shares_host=up.host in hosts)
        yield NodeJoined(at=self._now(), node=node, address=up.address, nproc=up.nproc, host=up.host)
        if up.host in self._draining:
            yield self._node_draining(node, self._draining[up.host])

    def _reject(self, node: NodeId, why: str) -> Iterator[Event]:
        """Give up a node that is alive but of no use."""
        self.nodes.give_up(node)
        yield NodeLost(at=self._now(), node=node, why=why)
        self._fleet.release(node)

    def _store_opened(self, node: NodeId, word: StoreOpened) -> Iterator[Event]:
        if word.port == 0:
            if not self._executor.store_failed(node, word):
                return
            if self.machine.job.master_port:
                raise port_in_use(node, word, self.machine.job.master_port)
            yield from self._reject(node, f"cannot open a store: {word.why}")
            return
        self._warnings.warn(word.why)
        self._executor.store_open(node, word)
