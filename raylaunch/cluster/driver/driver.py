"""The driver: the shell around the core's machine. It takes events, has the machine decide, acts, and records both."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol

from raylaunch.cluster import fleet_api as fleets
from raylaunch.cluster.agent.link import LinkDown, LinkServer
from raylaunch.cluster.capability import Capability, DriverPart, DriverPort
from raylaunch.cluster.driver.executor import Executor, port_in_use
from raylaunch.cluster.driver.ledger import DriverLedger, LastDriver
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet_api import (
    AgentAdopted,
    AgentLost,
    AgentsAdopted,
    Fleet,
    FleetFailed,
    HostDraining,
    ReportReceived,
    SlotGranted,
)
from raylaunch.cluster.local.scheduler import moment_of
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    DriverReplaced,
    Event,
    Finish,
    ForwardRequested,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    Release,
    ReportUnsaved,
    RequestCheckpoint,
    ResizeRequested,
    StopRequested,
    Tick,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.observe import observe
from raylaunch.core.machine.resuming import heard
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.machine.saving import short_grace
from raylaunch.core.machine.state import Done, Phase
from raylaunch.core.newtypes import NodeId, RunTime, SignalName
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import ClusterError
from raylaunch.node.linux import processes
from raylaunch.node.protocol.node_goal import CapabilitySection
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus, StoreOpened

_HEAR_SECONDS = 5.0
"""How long a driver that takes over waits for all agents to tell what is true there, before it decides anything."""


@dataclass(frozen=True, slots=True, eq=False)
class LoopCall:
    """Work that another thread wants done in the thread of `Driver.run`."""

    work: Callable[[RunTime], Iterable[Event]]
    """Gets the time of the run, and yields events for the machine."""
    answer: Future[Any]
    """Awaited by the other thread, and cancelled if the run ends before."""


Item = fleets.Item | LinkDown | LoopCall


class Inbox:
    """The queue of the driver: what the fleet and the links tell, and the work of other threads.

    Any thread and any signal handler may call `put` and `call`; only the thread of `Driver.run` may call the others.
    """

    def __init__(self, heard: Callable[[NodeId, float], None]) -> None:
        """`heard`: see `NodeRegistry`. It is called at once, so that a node counts while the driver is busy."""
        self._heard = heard
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Enqueue an item."""
        if isinstance(item, ReportReceived):
            self._heard(item.node, item.at)
        self._queue.put(item)

    def call(self, work: Callable[[RunTime], Iterable[Event]], answer: Future[Any]) -> None:
        """Enqueue work for the thread of `Driver.run`; see `LoopCall`."""
        self._queue.put(LoopCall(work, answer))

    def next_items(self, until: float) -> Iterator[Item]:
        """Yield all items that wait, or the first one to arrive; none if it is `until` before, as time.monotonic().

        All of them, since this process may have stood still: no deadline is enforced before what arrived in time is
        handled.
        """
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=_seconds_until(until))
            for _ in range(self._queue.qsize()):
                yield self._queue.get_nowait()

    def items_until(self, end: float) -> Iterator[Item]:
        """Yield items as they arrive, until this time.monotonic()."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get(timeout=_seconds_until(end))

    def close(self) -> None:
        """Drop what waits, and cancel the calls: the run is over."""
        for item in [self._queue.get_nowait() for _ in range(self._queue.qsize())]:
            if isinstance(item, LoopCall):
                item.answer.cancel()


def _seconds_until(end: float) -> float | None:
    return None if end == float("inf") else max(0.0, end - time.monotonic())


class RunClock:
    """The time of a run: seconds since its beginning."""

    def __init__(self, began: float) -> None:
        """`began`: the time.monotonic() of the run's beginning."""
        self.began = began

    def now(self) -> RunTime:
        """Return the present time."""
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> RunTime:
        """Convert a time.monotonic() of this process."""
        return RunTime(monotonic - self.began)


class Leadership(Protocol):
    """What is different for a driver of a detached run, which others may follow: see `succession`."""

    predecessor: LastDriver | None
    """None: this is the first driver of the run."""
    wake_at: float
    """When to call `stepped` at the latest, as time.monotonic(); infinity: there is nothing to wait for."""

    def heard(self, item: Item) -> None:
        """Hear what the driver hears: ends this process if another driver is in command."""

    def take_command(self) -> None:
        """Begin to command, after another driver: agents obey this one, or had the time to."""

    def lost(self, gone: AgentLost) -> None:
        """Record that a node is lost."""

    def perform(self, actions: Iterable[Action]) -> None:
        """Send at once what must not wait, and hold a launch back that another driver may decide too."""

    def stepped(self, decisions: Callable[[], DriverLedger], at: RunTime) -> None:
        """Send the orders of the last batch, with the ledger, if there is anything new."""

    def ended(self, nodes: NodeRegistry) -> None:
        """End this process if another driver may go on with the run, whose loop has ended here."""


class Driver:
    """Drives one run. Whatever changes the machine comes through the inbox, or with time.

    `run` is called in one thread; `signalled` and the fleet's reports may come from any.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        fleet: Fleet,
        journal: RunFolder,
        observer: RunObserver,
        began: float,
        links: LinkServer | None = None,
        leadership: Leadership | None = None,
        capabilities: Iterable[Capability] = (),
    ) -> None:
        """`began`: the time.monotonic() of the run's beginning, from which times in events are counted.

        `leadership`: of a detached run.
        """
        last = leadership.predecessor if leadership is not None else None
        ledger = last.ledger.decisions if last is not None else None
        self.machine = Machine(job, ledger.run if ledger is not None else None)
        self._fleet = fleet
        self._journal = journal
        self._observer = observer
        self._clock = RunClock(began)
        self.nodes = NodeRegistry(job.node_timeout, links)
        self.inbox = Inbox(self.nodes.heard)
        asked = ledger is not None and ledger.calls_should_checkpoint
        self.monitor = ProgressMonitor(calls_should_checkpoint=asked)
        #: By the names of their capabilities. `RunControl` adds one of its own.
        self.parts = {each.name: _begun(each, self, fleet, journal, observer) for each in capabilities}
        self._executor = Executor(self.machine, run_id, fleet, self.monitor, self.nodes)
        self._warnings = NodeWarnings(observer.on_message, ledger.warned if ledger is not None else ())
        self._leadership = leadership

    def signalled(self, signal: SignalName) -> None:
        """Take a signal. Any thread and any signal handler may call this: the signal is only enqueued."""
        self.inbox.call(lambda at: _signalled(self.machine.job, signal, at), Future())

    def run(self) -> Finish:
        """Run until the machine is done. The caller closes the fleet.

        Raises ClusterError if the run cannot go on: no torch on a node, `master_port` in use, the head lost.
        """
        try:
            with contextlib.ExitStack() as running:
                for part in self.parts.values():
                    running.enter_context(part.running())
                self._begin()
                self._loop()
        finally:
            self.inbox.close()
            if self._leadership is not None:
                self._leadership.ended(self.nodes)
        assert isinstance(self.machine.state, Done)
        return Finish(exit_code=self.machine.state.exit_code, why=self.machine.status)

    def _loop(self) -> None:
        while True:
            if self._leadership is not None:
                self._leadership.stepped(self.decisions, self._clock.now())
            if self.machine.phase is Phase.DONE:
                return
            for item in self._next_items():
                for event in self._events(item):
                    self._step(event)
            for event in self._due_events():
                self._step(event)

    def _begin(self) -> None:
        """Begin the run; or, after another driver, go on with it, with what the agents tell."""
        leadership = self._leadership
        last = leadership.predecessor if leadership is not None else None
        if leadership is None or last is None:
            self._record([(None, self._perform(self.machine.start()))])
            if self.machine.job.deadline is not None:
                self._step(_deadline(self.machine.job.deadline, self._clock.now()))
            self.nodes.start(self.inbox.put)
            self._fleet.start(self.inbox.put)
        elif self.machine.phase is Phase.DONE:
            leadership.take_command()
            return  # only the result may not be written
        else:
            for event in self._take_over(leadership, last):
                self._step(event)
        processes.release_memory()  # the agents take seconds to start, and afterwards this process mostly waits

    def _take_over(self, leadership: Leadership, last: LastDriver) -> Iterator[Event]:
        """Wait until all agents obey this driver and have told what is true there, and go on with that.

        Events of what else was heard meanwhile come after it.
        """
        asked = time.monotonic()
        last.assume_nodes(self.nodes, asked)
        self.nodes.start(self.inbox.put)
        self._fleet.start(self.inbox.put)
        adopted: dict[NodeId, AgentAdopted] = {}
        aside: list[Item] = []
        for item in self.inbox.items_until(asked + _HEAR_SECONDS):
            leadership.heard(item)
            if isinstance(item, AgentsAdopted):
                break
            if isinstance(item, AgentAdopted):
                adopted[item.node] = item
            else:
                aside.append(item)
        leadership.take_command()
        for node, agent in adopted.items():
            status = agent.report.status or NodeStatus()
            self.nodes.told(node, status)
            self._tell_parts(node, NodeStatus(), status)
        self._follow()
        attempt = self._executor.resume({node: agent.goal for node, agent in adopted.items()})
        yield DriverReplaced(
            at=self._clock.now(),
            driver=last.driver,
            process_seconds=last.process_seconds,
            state_seconds=last.state_seconds,
            prepare_seconds=asked - last.found_at,
            agents_seconds=time.monotonic() - asked,
            attempt=attempt,
        )
        for agent in adopted.values():
            yield from self._adopted(agent)
        for item in aside:
            yield from self._events(item)

    def _adopted(self, agent: AgentAdopted) -> Iterator[Event]:
        """Hear of a node from this moment on: it has no minute without a driver any more."""
        node, status = agent.node, agent.report.status
        if node in self.machine.nodes:
            self.nodes.heard(node, agent.at)
            self.nodes.came_up(node, self.machine.nodes[node].host, agent.at)
        if status is not None:
            workers = status.workers
            self.nodes.told(node, NodeStatus(workers=heard(self.machine.run, node, workers)))
            if workers.pids is not None:
                started = WorkersStarted(at=self._clock.now(), attempt=workers.attempt, node=node, pids=workers.pids)
                for part in self.parts.values():
                    part.started(started)
        yield from self._report(ReportReceived(node=node, report=agent.report, at=agent.at))

    def decisions(self) -> DriverLedger:
        """Return what another driver needs to go on with the run."""
        return DriverLedger(
            run=self.machine.run,
            warned=frozenset(self._warnings.said),
            calls_should_checkpoint=self.monitor.calls_should_checkpoint,
        )

    def _next_items(self) -> Iterator[Item]:
        """Yield what the driver hears before something is due, until the machine is done."""
        checks = [self._executor.wake_at, *(part.next_check for part in self.parts.values())]
        if self.machine.phase.is_training:
            checks.append(self.monitor.next_check)
        leading = (self._leadership.wake_at,) if self._leadership is not None else ()
        due_at = min(self._clock.began + min(checks), self.nodes.next_check, *leading)
        for item in self.inbox.next_items(due_at):
            yield item
            if self.machine.phase is Phase.DONE:
                return

    def _step(self, event: Event) -> None:
        """Let the machine handle an event. Act first, then record: no restart waits for the disk."""
        if any(part.holds(event, self._clock.now()) for part in self.parts.values()):
            return
        before = self.monitor.progress(event.at) if self.machine.needs_progress(event) else ()
        self._record([(each, self._perform(self.machine.handle(each), each)) for each in (*before, event)])

    def _perform(self, actions: list[Action], event: Event | None = None) -> tuple[Action, ...]:
        if self._leadership is not None:
            self._leadership.perform(actions)
        for action in actions:
            if isinstance(action, Release):
                for part in self.parts.values():
                    part.lost(action.node, is_dead=not action.frees_memory)
        if any(isinstance(action, Launch) for action in actions):
            self._follow()
        may_leave = isinstance(event, NodeDraining | NodeLost | ResizeRequested)  # other nodes than before
        is_asked = any(isinstance(action, RequestCheckpoint) for action in actions)
        if is_asked or (may_leave and self.machine.phase is Phase.SAVING):
            for part in self.parts.values():
                part.saving(self._clock.now())
        self._executor.perform(actions, self._clock.now())
        return tuple(actions)

    def _follow(self) -> None:
        """Begin to follow the attempt that the machine has launched, or that this driver takes over."""
        world = self.machine.world
        self.monitor.begin(world.attempt, world.size, has_progressed=world.has_progressed)
        for part in self.parts.values():
            part.launched(self._clock.now())

    def _record(self, steps: Iterable[tuple[Event | None, tuple[Action, ...]]]) -> None:
        for event, actions in steps:
            entry = JournalEntry(event=event, actions=actions)
            self._journal.append(entry)
            self._observer.on_entry(entry, self.machine)
            if isinstance(event, Progressed):
                self._warnings.warn(short_grace(self.machine.run))
            if any(isinstance(action, ReportUnsaved) for action in actions) and (text := self._executor.unsaved()):
                self._observer.on_message(text)
            for action in actions:
                if isinstance(action, RequestCheckpoint):
                    self._observer.on_message(_saving(action.why, can_save=self.monitor.can_save))

    # What is due.

    def _due_events(self) -> Iterator[Event]:
        if self.machine.phase is Phase.DONE:
            return
        for gone in self.nodes.silent(time.monotonic()):
            yield from self._node_lost(gone)
        now = self._clock.now()
        if now >= self._executor.wake_at:
            self._executor.wake_at = float("inf")
            yield Tick(at=now)
        if self.machine.phase.is_training:
            yield from self.monitor.due_events(now)
        for part in self.parts.values():
            yield from part.due_events(now)

    # From the fleet's reports to events.

    def _events(self, item: Item) -> Iterator[Event]:
        if self._leadership is not None:
            self._leadership.heard(item)
        match item:
            case LoopCall():
                yield from item.work(self._clock.now())
            case HostDraining():
                yield from self._host_draining(item)
            case FleetFailed():
                raise item.error
            case AgentsAdopted():
                return  # those that were waited for
            case _ if self.nodes.is_lost(item.node):
                return  # a report that was on its way when the node was given up
            case _:
                yield from self._of_node(item)

    def _of_node(self, item: SlotGranted | AgentAdopted | AgentLost | LinkDown | ReportReceived) -> Iterator[Event]:
        match item:
            case SlotGranted() if item.node in self.machine.nodes:
                return  # after a takeover, a node may join before the fleet has told again of its slot
            case SlotGranted():
                yield NodeGranted(at=self._clock.now(), node=item.node, address=item.address)
            case AgentAdopted():  # its agent did not answer in time when this driver began
                self._executor.resume_node(item.node, item.goal)
                if self._executor.differs(item.node, item.goal):
                    why = "the last driver had not told it what it told others"
                    yield from self._node_lost(AgentLost(node=item.node, why=why))
                else:
                    yield from self._adopted(item)
            case AgentLost():
                if not self.nodes.must_be_proved(item):
                    yield from self._node_lost(item)
            case LinkDown():
                yield from self._node_lost(self.nodes.link_down(item.node))
            case ReportReceived():
                yield from self._report(item)

    def _node_lost(self, gone: AgentLost) -> Iterator[Event]:
        if self._leadership is not None:
            self._leadership.lost(gone)
        for part in self.parts.values():
            part.lost(gone.node, is_dead=not gone.silent)
        self.nodes.give_up(gone.node)
        yield NodeLost(at=self._clock.now(), node=gone.node, why=gone.why)
        if self.machine.phase is not Phase.DONE:
            self._fleet.replace(gone)

    def _host_draining(self, item: HostDraining) -> Iterator[Event]:
        self.nodes.draining[item.host] = item
        if item.ours and self._leadership is None:
            self._observer.on_message("the host that this command runs on is being drained: with it the run ends")
        elif item.ours:
            why = "the host of the driver is being drained: another driver takes over when it is gone"
            self._observer.on_message(why)
        for node in self.nodes.on_host(item.host):
            yield self._node_draining(node, item)

    def _node_draining(self, node: NodeId, item: HostDraining) -> NodeDraining:
        return NodeDraining(at=self._clock.now(), node=node, deadline=self._clock.at(item.deadline), why=item.why)

    def _report(self, item: ReportReceived) -> Iterator[Event]:
        if item.report.output:
            self._observer.on_output(item.report.output)
        if item.report.heartbeat is not None:
            changed = self.monitor.heartbeat(item.report.heartbeat, self._clock.now())
            for part in self.parts.values():
                part.heartbeat(changed, self._clock.now())
            if (sample := self.monitor.sample(self._clock.now())) is not None:
                self._observer.on_progress(sample)
        for stacks in item.report.stacks:
            for part in self.parts.values():
                part.stacks(stacks)
        if item.report.status is not None:
            yield from self._status_changed(item, item.report.status)

    def _status_changed(self, item: ReportReceived, new: NodeStatus) -> Iterator[Event]:
        """Do what follows from all that is new in a node's status."""
        node, old = item.node, self.nodes.status(item.node)
        if new.generation <= old.generation:
            return
        self.nodes.told(node, new)
        self._tell_parts(node, old, new)
        if new.up is not None and new.up != old.up:
            yield from self._came_up(item, new.up)
        for store in new.stores:
            if store.generation > old.generation:
                yield from self._store_opened(node, store.opened)
        for event in observe(node, old.workers, new.workers, now=self._clock.now(), sent_at=item.report.sent_at):
            if isinstance(event, WorkersStarted):
                for part in self.parts.values():
                    part.started(event)
            yield event
        if new.proposed is not None and new.proposed != old.proposed:
            self._executor.answered(new.proposed)
        for warning in new.warnings:
            self._warnings.warn(warning)

    def _tell_parts(self, node: NodeId, old: NodeStatus, new: NodeStatus) -> None:
        for name, section in new.sections.items():
            if name in self.parts and section != old.sections.get(name):
                self.parts[name].told(node, section)

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
            yield NodeLost(at=self._clock.now(), node=node, why="it is not needed")
            return
        self.nodes.came_up(node, up.host, item.at)
        hosts = {member.host for member in self.machine.nodes.values()}
        self._warnings.came_up(up, several_hosts=bool(hosts - {up.host}), shares_host=up.host in hosts)
        yield NodeJoined(at=self._clock.now(), node=node, address=up.address, nproc=up.nproc, host=up.host)
        if up.host in self.nodes.draining:
            yield self._node_draining(node, self.nodes.draining[up.host])

    def _reject(self, node: NodeId, why: str) -> Iterator[Event]:
        """Give up a node that is alive but of no use."""
        self.nodes.give_up(node)
        yield NodeLost(at=self._clock.now(), node=node, why=why)
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


def _begun(
    capability: Capability, driver: Driver, fleet: Fleet, journal: RunFolder, observer: RunObserver
) -> DriverPart:
    def show(node: NodeId, body: bytes) -> None:
        fleet.send(node, CapabilitySection(capability=capability.name, body=body))

    def call(work: Callable[[], None]) -> None:
        def works(_: RunTime) -> Iterable[Event]:
            work()
            return ()

        driver.inbox.call(works, Future())

    def write_stacks(attempt: int, text: str) -> None:
        if where := journal.write_stacks(attempt, text):
            observer.on_message(f"what all workers were doing is in {where}")

    return capability.driver(
        DriverPort(
            machine=driver.machine,
            send=fleet.send,
            show=show,
            ask=partial(fleet.ask, capability.name),
            call=call,
            say=observer.on_message,
            progress=lambda: driver.monitor.world,
            write_stacks=write_stacks,
        )
    )


def _saving(why: str, *, can_save: bool) -> str:
    """Return what the workers do before a planned change, for a person."""
    if can_save:
        return f"requesting a checkpoint: {why}"
    return f"{why}; the workers have not called `should_checkpoint`, and may be stopped without a checkpoint"


def _signalled(job: Job, signal: SignalName, at: RunTime) -> Iterator[Event]:
    """Yield what follows from a signal."""
    if signal in job.signals_to_forward:
        yield ForwardRequested(at=at, signal=signal)
        return
    if job.grace:
        yield DeadlineSet(at=at, deadline=RunTime(at + job.grace), why=f"{signal} leaves {job.grace:g} s")
    yield StopRequested(at=at, signal=signal, save_seconds=job.grace)


def _deadline(text: str, now: RunTime) -> DeadlineSet:
    """Return the event of the job's deadline, which is a moment in ISO 8601."""
    end = moment_of(text)
    left = (end - datetime.now(timezone.utc)).total_seconds()
    why = f"`deadline` is {end.replace(tzinfo=None).isoformat(' ', 'seconds')}"
    return DeadlineSet(at=now, deadline=RunTime(now + left), why=why)


class NodeWarnings:
    """The warnings of all nodes of a run."""

    def __init__(self, say: Callable[[str], None], said: Collection[str] = ()) -> None:
        """`said`: what an earlier driver has said."""
        self._say = say
        self.said = set(said)
        #: What matters as soon as there are several hosts.
        self._of_several_hosts: set[str] = set()

    def warn(self, text: str) -> None:
        """Say this unless it was said before; `""`: there is nothing to say."""
        if text and text not in self.said:
            self.said.add(text)
            self._say(text)

    def came_up(self, up: AgentReady, *, several_hosts: bool, shares_host: bool) -> None:
        """Say what the workers of a node get because of other nodes: on other hosts, or on its own."""
        if shares_host and not up.threads:
            self.warn(
                "nodes share a host, so each worker has one OpenMP thread, as if they shared a node; "
                "`cpus_per_worker` or OMP_NUM_THREADS gives it more"
            )
        if up.interface_env:
            pairs = ", ".join(f"{name}={value}" for name, value in up.interface_env.items())
            self._of_several_hosts.add(f"workers get {pairs}: other hosts cannot reach what they would use otherwise")
        if several_hosts:
            for text in sorted(self._of_several_hosts):
                self.warn(text)
