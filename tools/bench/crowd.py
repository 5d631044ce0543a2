"""Agents without workers: a few Ray actors, each of which plays hundreds of them.

To the driver each of them is an agent of its own: its own pending call of `next_report`, its own beat and signs of life, its
own orders. What they share is the connection, of which Ray keeps one for each actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.agent.agent_session import Adoption, AgentSession
from raylaunch.cluster.agent.lease import report_interval
from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.newtypes import HostId, NodeTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.placement.plan import Bundle
from raylaunch.node.protocol.node_goal import LaunchWorkers, OpenStore, Order, StopWorkers
from raylaunch.node.protocol.node_status import AgentReady, Ready, StatusFeed, StoreOpened
from tests.fakes import TIMINGS, worker_exit

_READY = Ready(start_method=StartMethod.FORKSERVER, why=(), torch=True, pid=1)
_ECHO_SECONDS = 0.005
_LEASE_PART = 0.9
"""How much of `node_timeout` an agent's lease lasts, as in raylaunch.cluster.agent.lease."""
_ECHO = WorkerError(
    type="DistBackendError",
    message="[1] is setting up NCCL communicator: Connection was likely closed. Did the remote server shutdown?",
    traceback="Traceback (most recent call last):\n"
    + '  File "train.py", line 41, in main\n    loss.backward()\n' * 20,
)
"""What a worker says whose neighbour died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an agent was told."""

    launched_at: float
    """When the last of its launches came, on this machine's CLOCK_MONOTONIC."""
    sent: Counter[str]
    """Messages that it got, by their names."""
    least_lease: float = float("inf")
    """Seconds that were left of its lease when it was renewed, at the least."""


@dataclass(slots=True)
class Stub:
    """One agent, as far as the driver can tell."""

    node: str
    nproc: int
    status: StatusFeed = field(default_factory=lambda: StatusFeed(0))
    something: asyncio.Event = field(default_factory=asyncio.Event)
    part: Assignment | None = None
    workers: WorkersStatus = field(default_factory=WorkersStatus)
    step: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    """Messages that it got, by their names."""
    launched_at: float = 0.0
    """When the last of its launches came, on this machine's CLOCK_MONOTONIC."""
    answered_at: float = 0.0
    session: AgentSession = field(default_factory=AgentSession)
    least_lease: float = float("inf")
    """Seconds that were left of its lease when it was renewed, at the least."""

    def say(self, *words: Any) -> None:
        """With the next answer, at once."""
        for word in words:
            self.status.add(word)
        self.something.set()

    def fail(self, ranks: int) -> None:
        """Some of its workers end."""
        part = self.part
        assert part is not None
        failures = tuple(self._failure(part, local_rank, ranks) for local_rank in range(ranks))
        self.workers = replace(self.workers, failures=(*self.workers.failures, *failures))
        self.say(self.workers)

    def _failure(self, part: Assignment, local_rank: int, ranks: int) -> WorkerExit:
        return worker_exit(
            part.attempt,
            part.base_rank + local_rank,
            local_rank,
            pid=1000 + local_rank,
            at=time.monotonic(),
            exit_code=1 if ranks > 1 else -9,
            error=_ECHO if ranks > 1 else None,
        )

    def pulse(self) -> Heartbeat | None:
        """As if each worker made a few steps between two beats."""
        if self.part is None:
            return None
        self.step += 3
        marks = (
            WorkerProgress(
                rank=rank, marks=self.step, age=0.1, step=self.step - 1, first_age=0.3 * self.step, first_step=0
            )
            for rank in self.part.ranks
        )
        return Heartbeat(attempt=self.part.attempt, marks=tuple(marks))


class Crowd:
    """One of the actors. Every method of an agent takes the agent's name first."""

    def __init__(self, node_timeout: float, nproc: int, niceness: int) -> None:
        for thread in os.listdir("/proc/self/task"):  # Ray has its actors give way to all others, on this machine too
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
        self._nproc = nproc
        self._beat = report_interval(node_timeout)
        self._lease = node_timeout * _LEASE_PART
        self._stubs: dict[str, Stub] = {}

    def _stub(self, node: str) -> Stub:
        """An agent is there from the first word on that is asked of it."""
        stub = self._stubs.get(node)
        if stub is None:
            self._stubs[node] = stub = Stub(node, self._nproc)
            stub.say(AgentReady(host=HostId(f"host-of-{node}"), address="10.0.0.1", nproc=self._nproc, ready=_READY))
        return stub

    async def next_report(self, node: str, epoch: int = 0) -> bytes:
        """As an agent answers. `epoch`: the one of a driver that may be followed by another; 0: it is none."""
        stub = self._stub(node)
        session = stub.session
        if epoch:
            session.check(epoch)
        report = await self._report(stub, epoch)
        if epoch:
            session.check(epoch)
        return serialization.dump_report(replace(report, kept=session.kept))

    async def _report(self, stub: Stub, epoch: int) -> AgentReport:
        if stub.status.is_asked_first(epoch):
            stub.something.set()
        if stub.answered_at:
            stub.least_lease = min(stub.least_lease, stub.answered_at + self._lease - time.monotonic())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stub.something.wait(), self._beat)
        stub.something.clear()
        status = stub.status.news(epoch)
        stub.answered_at = time.monotonic()
        return AgentReport(sent_at=NodeTime(stub.answered_at), status=status, heartbeat=stub.pulse())

    def _obey(self, stub: Stub, order: Order) -> None:
        stub.sent[type(order).__name__] += 1
        match order:
            case LaunchWorkers(assignment=part):
                self._launch(stub, part)
            case StopWorkers():
                stub.part = None
                stub.workers = replace(stub.workers, stopped=())
                stub.say(stub.workers)
            case OpenStore(attempt=attempt):
                stub.say(StoreOpened(attempt=attempt, port=5000))
            case _:
                """Nothing that the benches look at."""

    def _launch(self, stub: Stub, part: Assignment) -> None:
        stub.launched_at, stub.part, stub.step = time.monotonic(), part, 0
        pids = tuple(range(1000, 1000 + part.nproc))
        stub.workers = WorkersStatus(attempt=part.attempt, pids=pids, timings=TIMINGS)
        stub.say(stub.workers)

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def obey(self, node: str, epoch: int, goal: bytes, ledger: bytes = b"") -> None:
        """Carry out what is new in a goal, and keep the ledger of a detached run's driver."""
        session = self._stub(node).session
        session.check(epoch)
        shown = serialization.load_goal(goal)
        if ledger:
            session.keep(epoch, shown.generation, ledger)
        for order in session.new_orders(epoch, shown):
            self._obey(self._stubs[node], order)

    async def look(self, node: str) -> Adoption:
        """Return what a driver needs that is about to take over."""
        return self._stub(node).session.look()

    async def adopt(self, node: str, epoch: int, _link: object) -> tuple[Adoption, bytes]:
        """Obey another driver from now on."""
        stub = self._stub(node)
        found = replace(stub.session.look(), ledger=b"")
        stub.session.adopt(epoch)
        report = AgentReport(sent_at=NodeTime(time.monotonic()), status=stub.status.news(epoch), heartbeat=stub.pulse())
        return found, serialization.dump_report(report)

    async def close(self, node: str) -> list[str]:
        """There is nothing to end, or to tell of it."""
        return []

    # What the bench does with them.

    async def fail(self, node: str) -> float:
        """A worker is killed there. Returns when that was."""
        at = time.monotonic()
        self._stubs[node].fail(1)
        return at

    async def echo(self, but: str, attempt: int) -> None:
        """All workers of the attempt fail a little later, if they are still there."""
        await asyncio.sleep(_ECHO_SECONDS)
        for stub in self._stubs.values():
            if stub.node != but and stub.part is not None and stub.part.attempt == attempt:
                stub.fail(stub.nproc)

    async def told(self) -> dict[str, Told]:
        """What each agent was told since it was asked to forget."""
        return {
            node: Told(launched_at=stub.launched_at, sent=stub.sent, least_lease=stub.least_lease)
            for node, stub in self._stubs.items()
        }

    async def forget(self) -> None:
        """Count anew."""
        for stub in self._stubs.values():
            stub.sent.clear()
            stub.least_lease = float("inf")


@dataclass(frozen=True, slots=True)
class _Method:
    method: Any
    node: str

    def remote(self, *args: Any) -> Any:
        return self.method.remote(self.node, *args)

    def options(self, **_: Any) -> _Method:
        return self


class Handle:
    """One agent of a crowd, to whoever orders it about."""

    def __init__(self, crowds: Crowds, node: str = "", actor: Any = None) -> None:
        self._crowds = crowds
        self.actor = actor
        self._node = node
        self.begin = self

    def remote(self, message: bytes) -> None:
        """`begin.remote`: the agent gets its name."""
        self._node = serialization.load_spec(message).node
        self.actor = self._crowds.place(self._node)

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.actor, name), self._node)


class Crowds:
    """All of them, in place of the class of the agents' actors."""

    def __init__(self, actors: int, node_timeout: float, nproc: int, name: str = "") -> None:
        """`name`: by which several processes use the same ones, which outlive them; "": they are of this process."""
        crowd: Any = ray.remote(num_cpus=0, max_concurrency=20_000)(Crowd)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.actors = []
        for number in range(actors):
            named = {"name": f"{name}-{number}", "namespace": name, "lifetime": "detached", "get_if_exists": True}
            self.actors.append(crowd.options(**(named if name else {})).remote(node_timeout, nproc, niceness))
        #: Which of them plays an agent.
        self.plays: dict[str, Any] = {}

    def options(self, **_: Any) -> Crowds:
        """They have their places."""
        return self

    def remote(self, _title: str) -> Handle:
        """One more agent."""
        return Handle(self)

    def place(self, node: str) -> Any:
        """Return the actor that plays an agent, from now on."""
        actor = self.plays[node] = self.actors[int(node.rpartition("-")[2]) % len(self.actors)]
        return actor

    def handle(self, node: str) -> Handle:
        """Return an agent that another driver has begun."""
        return Handle(self, node, self.place(node))

    def told(self) -> dict[str, Told]:
        """Of all agents."""
        parts = ray.get([actor.told.remote() for actor in self.actors])
        return {node: told for part in parts for node, told in part.items()}

    def forget(self) -> None:
        """Count anew."""
        ray.get([actor.forget.remote() for actor in self.actors])


class Room:
    """In place of the reservation: every seat is granted at once, on a host of its own."""

    seats = 0
    """Those of which another process has made a reservation."""

    def __init__(self, **_: Any) -> None:
        self._gang: list[int] = []

    def reserve_gang(self, bundles: Mapping[int, Bundle]) -> None:
        self._gang = list(bundles)

    def restore(self) -> None:
        self._gang = list(range(1, self.seats + 1))

    @property
    def slots(self) -> list[list[int]]:
        """All places are of one placement group."""
        return [self._gang]

    def options(self, *_: Any) -> dict[str, Any]:
        return {}

    def reserve(self, *_: Any) -> None:
        """There is no further place."""

    def release(self, _seat: int) -> None:
        """Nobody else would take it."""

    def when_granted(self, seat: int, call: Callable[[], None]) -> None:
        """At once."""
        if seat in self._gang:
            call()

    def hosts(self, _seat: int) -> dict[int, str]:
        return {seat: f"host-of-seat-{seat}" for seat in self._gang}

    def gang_hosts(self) -> dict[int, str]:
        return self.hosts(0)

    def cancel(self) -> None:
        pass
