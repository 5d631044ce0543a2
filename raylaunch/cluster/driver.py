"""The shell around the machine: takes the next fact, asks what to do, does it, writes both down."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from raylaunch.cluster.agent import AgentUp
from raylaunch.cluster.fleet import Fleet, Gone, Heard
from raylaunch.core.actions import Action, Finish, Forward, Launch, Release, Stop, WakeAt
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeJoined,
    NodeLost,
    StopAsked,
    Tick,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine, Phase
from raylaunch.core.ranks import Rendezvous, assign
from raylaunch.errors import ClusterError
from raylaunch.node import processes
from raylaunch.node.logs import Output
from raylaunch.node.messages import Ready, StoreOpen


class Observer(Protocol):
    """Whoever watches the run: the terminal."""

    def decided(self, entry: Entry, machine: Machine) -> None:
        """The machine took a step."""

    def wrote(self, output: Iterable[Output]) -> None:
        """Shown ranks wrote something."""

    def said(self, text: str) -> None:
        """Something worth a line that is no decision."""


class Journal(Protocol):
    """Where entries are written."""

    def append(self, entry: Entry) -> None:
        """One more."""


@dataclass(frozen=True, slots=True)
class _Signalled:
    signal: str


Item = Heard | Gone | _Signalled


class Driver:
    """One run. Everything that happens comes through the inbox; nothing else changes the machine."""

    def __init__(
        self,
        job: Job,
        run_id: str,
        fleet: Fleet,
        journal: Journal,
        observer: Observer,
        began: float,
    ) -> None:
        """`began`: the time.monotonic() that all times in events count from."""
        self.machine = Machine(job)
        self._run_id = run_id
        self._fleet = fleet
        self._journal = journal
        self._observer = observer
        self._began = began
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._wake_at: float | None = None
        #: Stores by node and attempt; None: asked for, but not open yet.
        self._stores: dict[tuple[str, int], StoreOpen | None] = {}
        self._noted = ""
        #: An attempt that waits for the store of its first node.
        self._unsent: Launch | None = None
        self._finish: Finish | None = None

    def signalled(self, signal: str) -> None:
        """A signal came. May be called from a signal handler: it only puts it away."""
        self._inbox.put(_Signalled(signal))

    def run(self) -> Finish:
        """Until the machine is done. The fleet is the caller's to close."""
        self._record(None, self.machine.start())
        self._fleet.start(self._inbox.put)
        processes.give_back_memory()  # while the agents start; later this process only waits
        while self.machine.phase is not Phase.DONE:
            for event in self._facts(self._next()):
                self._record(event, self.machine.handle(event))
        assert self._finish is not None, "a machine that is done has said Finish"
        return self._finish

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _next(self) -> Item | None:
        """The next item; None: it is time for a tick."""
        timeout = None if self._wake_at is None else max(0.0, self._wake_at - self._now())
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def _record(self, event: Event | None, actions: list[Action]) -> None:
        """Act first, write then: the disk must not stand between a death and the next start."""
        self._perform(actions)
        entry = Entry(event=event, actions=tuple(actions))
        self._journal.append(entry)
        self._observer.decided(entry, self.machine)

    # From what is heard to facts.

    def _facts(self, item: Item | None) -> Iterator[Event]:
        match item:
            case None:
                self._wake_at = None
                yield Tick(at=self._now())
            case _Signalled() if item.signal in self.machine.job.signals_to_forward:
                yield ForwardAsked(at=self._now(), signal=item.signal)
            case _Signalled():
                yield StopAsked(at=self._now(), signal=item.signal)
            case Gone():
                yield NodeLost(at=self._now(), node=item.node, why=item.why)
                if self.machine.phase is not Phase.DONE:
                    self._fleet.replace(item)
            case Heard():
                yield from self._heard(item)

    def _heard(self, item: Heard) -> Iterator[Event]:
        if item.words.output:
            self._observer.wrote(item.words.output)
        behind = self._now() - item.words.now
        for word in item.words.events:
            match word:
                case AgentUp():
                    yield from self._up(item.node, word)
                case StoreOpen():
                    yield from self._store_open(item.node, word)
                case WorkersStarted():
                    yield replace(word, at=self._now())
                case WorkersExited() | WorkersStopped():
                    yield replace(word, at=self._now(), failures=_on_our_clock(word.failures, behind))
                case Ready():
                    raise AssertionError(word)  # the agent tells of it as AgentUp

    def _up(self, node: str, up: AgentUp) -> Iterator[Event]:
        for why in up.ready.why:
            self._observer.said(f"{node}: {why}")
        if not up.ready.torch and node in self.machine.nodes:
            yield NodeLost(at=self._now(), node=node, why="no worker can be started there any more")
            self._fleet.release(node)
            return
        if not up.ready.torch:
            msg = f"no worker can be started on {up.address}, since torch cannot be imported there"
            raise ClusterError(msg, hint="; ".join(up.ready.why))
        if node in self.machine.nodes:
            return  # its fork server was replaced, the agent is the same
        if self._fleet.joined(node, up.node_id):
            yield NodeJoined(at=self._now(), node=node, address=up.address, nproc=up.nproc)

    def _store_open(self, node: str, word: StoreOpen) -> Iterator[Event]:
        if word.port == 0 and self.machine.job.master_port:
            raise _port_is_taken(node, word, self.machine.job.master_port)
        if word.port == 0:
            yield NodeLost(at=self._now(), node=node, why=f"cannot open a store: {word.why}")
            return
        if word.why and word.why != self._noted:
            self._noted = word.why  # the same for each attempt: said once
            self._observer.said(word.why)
        self._stores[node, word.attempt] = word
        if self._unsent is not None and self._needs(self._unsent) == (node, word.attempt):
            self._send(self._unsent, word)

    def _needs(self, launch: Launch) -> tuple[str, int]:
        """The store that an attempt waits for: on its first node."""
        return launch.roster[0], launch.attempt

    # From orders to deeds.

    def _perform(self, actions: list[Action]) -> None:
        launched = {node for action in actions if isinstance(action, Launch) for node in action.roster}
        for action in actions:
            match action:
                case Launch():
                    self._launch(action)
                case Stop():
                    # Nodes that get a Launch with it end the attempt before anyway: one message, not two.
                    covered = launched if action.grace == 0 else set()
                    for node in set(action.nodes) - covered:
                        self._fleet.stop(node, action.attempt, action.grace, action.signal)
                case Forward():
                    for node in action.nodes:
                        self._fleet.forward(node, action.attempt, action.signal)
                case Release():
                    self._fleet.release(action.node)
                case WakeAt():
                    self._wake_at = action.at
                case Finish():
                    self._finish = action

    def _launch(self, launch: Launch) -> None:
        """Send it at once where the store is open; else when it is."""
        store = self._stores.get(self._needs(launch))
        if store is not None:
            self._send(launch, store)
        else:
            self._unsent = launch
            self._ask_store(*self._needs(launch))

    def _ask_store(self, node: str, attempt: int) -> None:
        """Once only: a second store for the attempt would close the first."""
        if (node, attempt) not in self._stores:
            self._stores[node, attempt] = None
            self._fleet.open_store(node, attempt)

    def _send(self, launch: Launch, store: StoreOpen) -> None:
        """One message to each node; then have the next attempt's store opened, before it is needed.

        Where all attempts use the same port, the next store can only be opened when this one is no longer needed.
        """
        self._unsent = None
        members = [self.machine.nodes[node] for node in launch.roster if node in self.machine.nodes]
        if len(members) < len(launch.roster):
            return  # one was lost meanwhile; the machine knows and will decide anew
        meeting = Rendezvous(
            master_addr=store.address or members[0].address,
            master_port=store.port,
            run_id=self._run_id,
            max_restarts=self.machine.job.max_restarts,
            restart_count=self.machine.restarts,
            role=self.machine.job.role,
            signals_to_handle=tuple(self.machine.job.signals_to_handle),
            virtual_local_rank=self.machine.job.virtual_local_rank,
        )
        for part in assign(launch.attempt, members):
            self._fleet.launch(part.node, part, meeting)
        self._stores = {key: other for key, other in self._stores.items() if key[1] > launch.attempt}
        if not self.machine.job.master_port:
            self._ask_store(launch.roster[0], launch.attempt + 1)


def _port_is_taken(node: str, word: StoreOpen, port: int) -> ClusterError:
    return ClusterError(
        f"port {port} of {node} ({word.address}) cannot be used as `master_port`: {word.why}",
        hint="give another one, or none: then a free one is found",
    )


def _on_our_clock(failures: tuple[Failure, ...], behind: float) -> tuple[Failure, ...]:
    """Times of death, from the node's clock to seconds since the run began; off by what the message took."""
    return tuple(replace(failure, at=failure.at + behind) for failure in failures)
