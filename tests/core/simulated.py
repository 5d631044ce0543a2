"""Worlds that carry out a machine's orders, in part: nodes that obey, and silent ones; and whole clusters of hosts.

What must never be ordered is checked as it is ordered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from story import (
    check,
    checkpointed,
    draining,
    failed,
    finished,
    forward,
    hung,
    joined,
    lost,
    progressed,
    raised,
    started,
    stopped,
    tick,
)

from raylaunch.core.actions import Action, AskCheckpoint, Finish, Launch, Readmit, Release, Shun, Stop, WakeAt
from raylaunch.core.events import (
    Event,
    NodeDraining,
    NodeJoined,
    NodeLost,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.job import Job
from raylaunch.core.machine import Machine
from raylaunch.core.phases import STOP_MARGIN, Phase

Happening = Event | Callable[[], None]

ECHO = raised("RuntimeError", "Connection reset by peer")


@dataclass
class World:
    """Nodes that carry out orders within their time, save the silent ones; and a clock that wakes the machine."""

    machine: Machine
    silent: dict[str, str] = field(default_factory=dict)
    now: float = 0.0
    alarm: float | None = None
    finish: Finish | None = None
    #: Nodes that the machine was told of, and may count on until it is told more, or gives them up.
    here: dict[str, NodeJoined] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    shunned: set[str] = field(default_factory=set)
    #: When each came, and when the present world was made.
    came: dict[str, float] = field(default_factory=dict)
    launched: float = 0.0
    #: What each node runs at present: the attempt. A node that is gone has no entry.
    runs: dict[str, int] = field(default_factory=dict)
    #: Nodes whose workers have a signal, and time to end.
    ending: set[str] = field(default_factory=set)
    coming: list[tuple[float, int, Happening]] = field(default_factory=list)
    seen: int = 0

    def expect(self, event: Event) -> None:
        self.at(event.at, event)

    def at(self, when: float, happening: Happening) -> None:
        self.seen += 1
        heapq.heappush(self.coming, (when, self.seen, happening))

    def live(self, *, at_most: int) -> None:
        """Until the machine is done, or nothing more can happen."""
        self.obey(self.machine.start())
        for _ in range(at_most):
            found = self.next_happening()
            if found is None or self.finish is not None:
                return
            self.now, happening = max(self.now, found[0]), found[1]
            if callable(happening):
                happening()
            elif self.happens(happening):
                self.tell(replace(happening, at=self.now))
        pytest.fail("it goes on for ever")

    def tell(self, event: Event) -> None:
        before = self.machine.restarts
        actions = self.machine.handle(event)
        self.obey(actions)
        spent = self.machine.restarts - before
        assert 0 <= self.machine.restarts <= self.machine.job.max_restarts
        assert spent <= 0 or isinstance(event, WorkersExited | WorkersHung), f"{event} spent a restart"
        if actions or len(self.here) < 100:
            check(self.machine)
            assert not self.is_idle(), "there is a world to be had, and nothing is waited for"

    def is_idle(self) -> bool:
        machine = self.machine
        if machine.phase is not Phase.GATHERING or machine.not_before is not None or not machine.members.enough:
            return False
        return machine.last_call is None or len(machine.members) >= machine.job.max_nodes

    def next_happening(self) -> tuple[float, Happening] | None:
        if self.alarm is not None and (not self.coming or self.alarm <= self.coming[0][0]):
            alarm, self.alarm = self.alarm, None
            return alarm, tick(alarm)
        if not self.coming:
            return None
        when, _, happening = heapq.heappop(self.coming)
        return when, happening

    def happens(self, event: Event) -> bool:
        """Whether it does: the dead are silent, and workers that were ended do not exit by themselves."""
        match event:
            case NodeJoined():
                self.runs[event.node] = 0
                self.here[event.node] = event
                self.came[event.node] = self.now
            case NodeLost():
                self.runs.pop(event.node, None)
                return self.is_gone(event.node)
            case NodeDraining():
                self.drained |= {event.node} & self.here.keys()
                return event.node in self.here
            case WorkersStopped():
                self.ending.discard(event.node)
                return event.node in self.runs
            case WorkersStarted() | WorkersExited() | WorkersCheckpointed():
                return self.runs.get(event.node) == event.attempt
        return True

    def is_gone(self, node: str) -> bool:
        """From now on; whether it was there."""
        self.ending.discard(node)
        return self.here.pop(node, None) is not None

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self.launch_all(action)
                case Stop():
                    for node in action.nodes:
                        self.stop(node, action)
                case AskCheckpoint():
                    for node in action.nodes:
                        self.ask(node, action.attempt)
                case WakeAt():
                    self.alarm = action.at
                case Finish():
                    self.finish = action
                case Release() | Shun() | Readmit():
                    self.place(action)

    def place(self, action: Release | Shun | Readmit) -> None:
        match action:
            case Release():
                self.runs.pop(action.node, None)
                assert self.is_gone(action.node), f"{action.node} is given up, and is not there"
            case Shun():
                self.shunned.add(action.host)
            case Readmit():
                self.shunned.remove(action.host)

    def launch_all(self, order: Launch) -> None:
        """No two attempts at once, nobody's grace cut short, and a roster of nodes that can be used."""
        job, roster = self.machine.job, set(order.roster)
        strays = [node for node, attempt in self.runs.items() if attempt and node not in roster]
        assert not strays, f"{strays} still run an earlier attempt"
        assert not self.ending, f"{self.ending} are still ending theirs"
        assert job.min_nodes <= len(roster) == len(order.roster) <= job.max_nodes
        assert roster <= self.here.keys() - self.drained
        assert self.shunned.isdisjoint(self.here[node].host for node in roster)
        workers = sum(self.here[node].nproc for node in roster)
        assert workers % job.multiple_of == 0
        assert workers == self.machine.workers
        self.launched = self.now
        for node in order.roster:
            self.launch(node, order.attempt)

    def launch(self, node: str, attempt: int) -> None:
        if node in self.runs:  # it may be gone, and the machine not know it yet
            self.runs[node] = attempt
        if "never starts" not in self.silent.get(node, ""):
            self.expect(started(node, self.now + 0.1, attempt=attempt))
            self.expect(finished(node, self.now + 50.0, attempt=attempt))

    def ask(self, node: str, attempt: int) -> None:
        assert self.machine.attempt == attempt
        assert self.runs.get(node, attempt) == attempt, f"{node} does not run what it should save"
        if "never saves" not in self.silent.get(node, ""):
            self.expect(checkpointed(node, self.now + 0.4, attempt=attempt))

    def stop(self, node: str, order: Stop) -> None:
        assert node in self.here
        if self.runs.get(node) == order.attempt:
            self.runs[node] = 0
            if order.grace:
                self.ending.add(node)
        if "never stops" not in self.silent.get(node, ""):
            self.expect(stopped(node, self.now + order.grace / 2, attempt=order.attempt))


class Cluster(World):
    """Hosts that are there or not, and a fleet that keeps as many nodes on them as the job wants."""

    def __init__(
        self,
        job: Job,
        *,
        hosts: int,
        seed: int,
        silent: float = 0.0,
        sizes: tuple[int, ...] = (2,),
        late: float = 0.0,
        twice: float = 0.0,
    ) -> None:
        """`silent`: how many nodes are. Words come so `late`, in the mean, and so many of them come `twice`."""
        super().__init__(Machine(job))
        self.random = Random(seed)
        self.wanted = job.max_nodes + job.spares
        self.size = {f"host-{number}": self.random.choice(sizes) for number in range(hosts)}
        self.free = list(self.size)
        self.away: set[str] = set()
        self.placed: dict[str, str] = {}
        self.named = 0
        #: Nodes that are drained, with time enough to leave them.
        self.calm: set[str] = set()
        #: Failures that no lost node explains.
        self.own_failures = 0
        self.silences, self.late, self.twice = silent, late, twice
        self.man()

    # Words.

    def expect(self, event: Event) -> None:
        lag = self.random.expovariate(1 / self.late) if self.late and isinstance(event, WorkerEvent) else 0.0
        self.at(event.at + lag, event)

    def tell(self, event: Event) -> None:
        super().tell(event)
        if isinstance(event, WorkerEvent | NodeLost) and self.random.random() < self.twice:
            self.at(self.now + self.random.expovariate(1.0), lambda: self.tell_again(event))

    def tell_again(self, event: Event) -> None:
        super().tell(replace(event, at=self.now))

    # The fleet.

    def man(self) -> None:
        """Places for all nodes that are missing, off the hosts that are shunned."""
        kept = [host for host in self.free if host in self.shunned]
        free = [host for host in self.free if host not in self.shunned]
        while free and len(self.placed) < self.wanted:
            self.named += 1
            node, host = f"node-{self.named}", free.pop(self.random.randrange(len(free)))
            self.placed[node] = host
            if self.random.random() < self.silences:
                self.silent[node] = self.random.choice(("never starts", "never stops", "never saves"))
            when, nproc = self.now + self.random.uniform(0.2, 1.0), self.size[host]
            self.expect(joined(node, when, nproc=nproc, address=f"10.0.0.{self.named}", host=host))
        self.free = kept + free

    def place(self, action: Release | Shun | Readmit) -> None:
        super().place(action)
        self.at(self.now, self.man)

    def happens(self, event: Event) -> bool:
        if isinstance(event, NodeJoined) and event.node not in self.placed:
            return False  # its host went before it came up
        return super().happens(event)

    def is_gone(self, node: str) -> bool:
        """Its place is given to another node, there or elsewhere."""
        host = self.placed.pop(node, None)
        if host is not None and host not in self.away:
            self.free.append(host)
        self.at(self.now, self.man)
        return super().is_gone(node)

    # Faults.

    def suffer(self, *, until: float, every: float, kinds: tuple[str, ...]) -> None:
        """One of these, every so many seconds."""
        at = 10.0
        while at < until:
            self.at(at, getattr(self, self.random.choice(kinds)))
            at += self.random.expovariate(1 / every)

    def some_node(self) -> str | None:
        return self.random.choice(sorted(self.here)) if self.here else None

    def agent(self) -> None:
        """One dies alone; its host is free for the next at once."""
        node = self.some_node()
        if node is not None and node in self.runs:
            self.runs.pop(node)
            self.expect(lost(node, self.now + 0.1))

    def signal(self) -> None:
        self.tell(forward("SIGUSR1", self.now))

    def leave(self, node: str, *, told: float, back: float) -> None:
        """All is dead there at once; that is known a little later; and the host comes back."""
        host = self.placed[node]
        self.runs.pop(node, None)
        self.away.add(host)
        self.expect(lost(node, self.now + told))
        self.at(self.now + told + back, lambda: self.come_back(host))

    def come_back(self, host: str) -> None:
        self.away.discard(host)
        if host not in self.placed.values() and host not in self.free:
            self.free.append(host)
        self.man()

    def kill(self) -> None:
        self.goes(told=0.3)

    def cut(self) -> None:
        self.goes(told=5.0)

    def rack(self) -> None:
        for _ in range(5):
            self.goes(told=0.5)

    def goes(self, *, told: float) -> None:
        """A host goes; first some of what ran there is killed, or a peer notices."""
        node = self.some_node()
        if node is None or node not in self.runs:
            return
        attempt, peer = self.runs[node], self.some_node()
        if attempt and self.random.random() < 0.3:
            self.say(failed(node, self.now, attempt=attempt))
        if node not in self.placed:  # that was one failure too many: it is given up before it is known to be lost
            self.own_failures += 1
            return
        self.leave(node, told=told, back=self.random.uniform(1.0, 60.0))
        if attempt and peer is not None and self.random.random() < 0.5:
            self.at(self.now + 0.1, lambda: self.echoes(peer, node))

    def echoes(self, peer: str, gone: str) -> None:
        """Where both have a part in the present attempt: the next may have been made without who is gone."""
        if gone in self.machine.roster:
            self.say(failed(peer, self.now, attempt=self.runs.get(peer, 0), **ECHO))

    def say(self, word: WorkersExited) -> None:
        if word.attempt and self.happens(word):
            self.tell(word)

    def drain(self) -> None:
        node = self.some_node()
        if node is None or node not in self.runs or node in self.drained:
            return
        deadline = self.now + self.random.choice((5.0, 30.0, 120.0, 200.0))
        enough = 2 * self.machine.job.shutdown_timeout + STOP_MARGIN
        if deadline - self.now > enough and not (self.silences or self.late):
            self.calm.add(node)
        host = self.placed[node]
        self.away.add(host)
        self.expect(draining(node, self.now, deadline=deadline))
        self.at(deadline, lambda: self.drain_is_over(node, host))

    def drain_is_over(self, node: str, host: str) -> None:
        """It was let go before, where there was time for that and no fault came between."""
        if self.placed.get(node) == host:
            assert node not in self.calm or self.machine.phase is Phase.DONE, f"{node} is still needed when it goes"
            self.leave(node, told=0.3, back=30.0)
        else:
            self.come_back(host)

    def crash(self) -> None:
        node = self.some_node()
        if node is not None and self.runs.get(node):
            self.own_failures += 1
            self.say(failed(node, self.now, attempt=self.runs[node], **raised("ValueError", line=self.own_failures)))

    def hang(self) -> None:
        node = self.some_node()
        if node is not None and self.runs.get(node) and self.machine.phase is Phase.RUNNING:
            self.own_failures += 1
            self.tell(hung(node, self.now, attempt=self.runs[node], exit_code=1, rank=self.own_failures))

    def progress(self) -> None:
        self.tell(progressed(self.now, attempt=self.machine.attempt))

    # In the end.

    def best(self, since: float) -> int:
        """The most workers that nodes could make that are not drained, and came before that time. For one size only."""
        job, (size,) = self.machine.job, set(self.size.values())
        there = [node for node in self.here if node not in self.drained and self.came[node] < since]
        most = min(len(there), job.max_nodes)
        return max((size * nodes for nodes in range(most + 1) if size * nodes % job.multiple_of == 0), default=0)
