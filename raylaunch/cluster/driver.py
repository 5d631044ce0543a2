"""The shell around the machine: takes the next fact, asks what to do, does it, writes both down."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from raylaunch.cluster import fleet as fleets
from raylaunch.cluster.agent import AgentUp
from raylaunch.cluster.fleet import Draining, Fleet, Gone, Granted, Heard, Hopeless
from raylaunch.cluster.lifeline import Severed
from raylaunch.cluster.observer import Journal, Observer
from raylaunch.cluster.orders import Orders
from raylaunch.cluster.presence import Lines, Presence
from raylaunch.cluster.watch import Watch
from raylaunch.core.actions import Action, Finish
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    StopAsked,
    Tick,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase
from raylaunch.core.progress import Progress
from raylaunch.errors import ClusterError
from raylaunch.node import processes
from raylaunch.node.messages import Learned, Proposed, Ready, StoreOpen, WorkersStacks
from raylaunch.node.supervisor import Event as Word

_MAY_END_IT = (WorkersExited, WorkersHung, WorkersCheckpointed, NodeLost, NodeDraining, StopAsked, Tick)
"""Events that may be the last of an attempt."""


class Lifelines(Lines, Protocol):
    """Connections to the agents that end when either side does."""

    def start(self, tell: Callable[[Severed], None]) -> None:
        """Begin."""


@dataclass(frozen=True, slots=True)
class _Signalled:
    signal: str


Item = fleets.Item | Severed | _Signalled


class Driver:
    """One run. Everything that happens comes through the inbox or with time; nothing else changes the machine."""

    def __init__(
        self,
        job: Job,
        run_id: str,
        fleet: Fleet,
        journal: Journal,
        observer: Observer,
        began: float,
        lifelines: Lifelines | None = None,
    ) -> None:
        """`began`: the time.monotonic() that all times in events count from."""
        self.machine = Machine(job)
        self._fleet = fleet
        self._journal = journal
        self._observer = observer
        self._began = began
        self._lifelines = lifelines
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._presence = Presence(job.node_timeout, lifelines)
        self._watch = Watch(_progress(job), fleet, self._write_stacks, observer.said)
        self._orders = Orders(self.machine, run_id, fleet, self._watch, self._presence.give_up)
        #: Ray's ids of the machines, by node.
        self._hosts: dict[str, str] = {}
        self._draining: dict[str, Draining] = {}
        self._noted = ""
        self._left_out: set[str] = set()

    def signalled(self, signal: str) -> None:
        """A signal came. May be called from a signal handler: it only puts it away."""
        self._inbox.put(_Signalled(signal))

    def run(self) -> Finish:
        """Until the machine is done. The fleet is the caller's to close."""
        self._record([(None, self._perform(self.machine.start()))])
        if self._lifelines is not None:
            self._lifelines.start(self._inbox.put)
        self._fleet.start(self._tell)
        processes.give_back_memory()  # while the agents start; later this process only waits
        while self.machine.phase is not Phase.DONE:
            for item in self._waiting():
                for event in self._facts(item):
                    self._step(event)
            for event in self._due():
                self._step(event)
        assert self._orders.finish is not None, "a machine that is done has said Finish"
        return self._orders.finish

    def _tell(self, item: fleets.Item) -> None:
        """From Ray's threads, so what is heard counts as heard also while this thread is busy."""
        if isinstance(item, Heard):
            self._presence.heard(item.node, item.at)
        self._inbox.put(item)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _waiting(self) -> Iterator[Item]:
        """What is there, or the first that comes; nothing where it is time for something.

        All that is there: after a while in which this process stood still, no deadline is kept before it is known
        what happened in time.
        """
        times = [self._presence.next_look - self._began, self._orders.wake_at]
        if self._is_watched():
            times.append(self._watch.next_look)
        nearest = min(times)
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=None if nearest == float("inf") else max(0.0, nearest - self._now()))
            for _ in range(self._inbox.qsize()):
                if self.machine.phase is Phase.DONE:
                    return
                yield self._inbox.get_nowait()

    def _step(self, event: Event) -> None:
        """Act first, write then: the disk must not stand between a death and the next start."""
        before = self._watch.how_far(event.at) if self._may_end_it(event) else ()
        asking = self.machine.asking
        self._record([(each, self._perform(self.machine.handle(each))) for each in (*before, event)])
        ends_it = asking and not self.machine.asking and isinstance(event, Tick | WorkersCheckpointed)
        if ends_it and (why := self._orders.unsaved()):
            self._observer.said(why)

    def _may_end_it(self, event: Event) -> bool:
        """Whether how far the attempt came is to be said before it, for which all workers are looked through.

        That a node's workers ended well, or have saved, ends an attempt only where those of all others did before.
        """
        match event:
            case WorkersStopped():  # it may have made steps as long as it was given time
                return self.machine.phase is Phase.STOPPING and self.machine.awaited <= {event.node}
            case _ if not self._is_watched():
                return False
            case WorkersExited(failures=()):
                return self.machine.unfinished <= {event.node}
            case WorkersCheckpointed(step=int()):
                return self.machine.awaited <= {event.node}
            case _:
                return isinstance(event, _MAY_END_IT)

    def _perform(self, actions: list[Action]) -> tuple[Action, ...]:
        self._orders.perform(actions, self._now())
        return tuple(actions)

    def _record(self, steps: Iterable[tuple[Event | None, tuple[Action, ...]]]) -> None:
        for event, actions in steps:
            entry = Entry(event=event, actions=actions)
            self._journal.append(entry)
            self._observer.decided(entry, self.machine)

    def _write_stacks(self, attempt: int, text: str) -> None:
        if where := self._journal.write_stacks(attempt, text):
            self._observer.said(f"what all workers were doing is in {where}")

    # What comes with time.

    def _due(self) -> Iterator[Event]:
        if self.machine.phase is Phase.DONE:
            return
        for gone in self._presence.silent(time.monotonic()):
            yield from self._lost(gone)
        now = self._now()
        if now >= self._orders.wake_at:
            self._orders.wake_at = float("inf")
            yield Tick(at=now)
        if self._is_watched():
            yield from self._watch.due(now)

    def _is_watched(self) -> bool:
        """Whether workers are to make steps; also those that were asked to save at one that is still to come."""
        return self.machine.phase is Phase.RUNNING or self.machine.asking

    # From what is heard to facts.

    def _facts(self, item: Item) -> Iterator[Event]:
        match item:
            case _Signalled():
                asked = ForwardAsked if item.signal in self.machine.job.signals_to_forward else StopAsked
                yield asked(at=self._now(), signal=item.signal)
            case Draining():
                yield from self._drained(item)
            case Hopeless():
                raise item.error
            case _ if self._presence.is_past(item.node):
                return  # nothing of its past is believed
            case Granted():
                yield NodeGranted(at=self._now(), node=item.node, address=item.address)
            case Gone():
                if not self._presence.doubted(item):
                    yield from self._lost(item)
            case Severed():
                yield from self._lost(self._presence.severed(item.node))
            case Heard():
                yield from self._heard(item)

    def _lost(self, gone: Gone) -> Iterator[Event]:
        self._presence.give_up(gone.node)
        yield NodeLost(at=self._now(), node=gone.node, why=gone.why)
        if self.machine.phase is not Phase.DONE:
            self._fleet.replace(gone)

    def _drained(self, item: Draining) -> Iterator[Event]:
        self._draining[item.host] = item
        if item.ours:
            self._observer.said("the host that this command runs on is being drained: with it the run ends")
        for node in [node for node, host in self._hosts.items() if host == item.host]:
            yield self._node_draining(node, item)

    def _node_draining(self, node: str, item: Draining) -> NodeDraining:
        return NodeDraining(at=self._now(), node=node, deadline=item.deadline - self._began, why=item.why)

    def _heard(self, item: Heard) -> Iterator[Event]:
        if item.words.output:
            self._observer.wrote(item.words.output)
        if item.words.pulse is not None:
            self._watch.take(item.words.pulse, self._now())
        for word in item.words.events:
            yield from self._word(item, word)

    def _word(self, item: Heard, word: AgentUp | Word) -> Iterator[Event]:
        match word:
            case AgentUp():
                yield from self._up(item, word)
            case StoreOpen():
                yield from self._store_open(item.node, word)
            case WorkersStarted():
                self._watch.started(word)
                yield replace(word, at=self._now())
            case WorkersCheckpointed():
                yield replace(word, at=self._now())
            case WorkersExited() | WorkersStopped():
                now = self._now()
                yield replace(word, at=now, failures=_on_our_clock(word.failures, now - item.words.now))
            case WorkersStacks():
                self._watch.stacks(word)
            case Proposed():
                self._orders.proposed(word)
            case Learned():
                self._learned(word)
            case Ready():
                raise AssertionError(word)  # the agent tells of it as AgentUp

    def _learned(self, word: Learned) -> None:
        if word.why and word.why not in self._left_out:
            self._left_out.add(word.why)  # on all nodes alike: said once
            self._observer.said(word.why)

    def _up(self, item: Heard, up: AgentUp) -> Iterator[Event]:
        node = item.node
        for why in up.ready.why:
            self._observer.said(f"{node}: {why}")
        if not up.ready.torch and node in self.machine.nodes:
            yield from self._dismissed(node, "no worker can be started there any more")
            return
        if not up.ready.torch:
            msg = f"no worker can be started on {up.address}, since torch cannot be imported there"
            raise ClusterError(msg, hint="; ".join(up.ready.why))
        if node in self.machine.nodes:
            return  # its fork server was replaced, the agent is the same
        if not self._fleet.joined(node, up.node_id):
            self._presence.give_up(node)
            yield NodeLost(at=self._now(), node=node, why="it is not needed")
            return
        self._presence.came_up(node, item.at)
        self._hosts[node] = up.node_id
        yield NodeJoined(at=self._now(), node=node, address=up.address, nproc=up.nproc, host=up.node_id)
        if up.node_id in self._draining:
            yield self._node_draining(node, self._draining[up.node_id])

    def _dismissed(self, node: str, why: str) -> Iterator[Event]:
        """It is there, but of no use."""
        self._presence.give_up(node)
        yield NodeLost(at=self._now(), node=node, why=why)
        self._fleet.release(node)

    def _store_open(self, node: str, word: StoreOpen) -> Iterator[Event]:
        if word.port == 0 and self.machine.job.master_port:
            raise _port_is_taken(node, word, self.machine.job.master_port)
        if word.port == 0:
            yield from self._dismissed(node, f"cannot open a store: {word.why}")
            return
        if word.why and word.why != self._noted:
            self._noted = word.why  # the same for each attempt: said once
            self._observer.said(word.why)
        self._orders.store_open(node, word)


def _progress(job: Job) -> Progress:
    auto = job.hang_timeout == "auto"
    seconds = None if isinstance(job.hang_timeout, str) else float(job.hang_timeout)
    return Progress(seconds, auto)


def _port_is_taken(node: str, word: StoreOpen, port: int) -> ClusterError:
    return ClusterError(
        f"port {port} of {node} ({word.address}) cannot be used as `master_port`: {word.why}",
        hint="give another one, or none: then a free one is found",
    )


def _on_our_clock(failures: tuple[Failure, ...], behind: float) -> tuple[Failure, ...]:
    """Times of death, from the node's clock to seconds since the run began; off by what the message took."""
    return tuple(replace(failure, at=failure.at + behind) for failure in failures)
