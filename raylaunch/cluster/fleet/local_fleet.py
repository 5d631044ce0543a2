"""The fleet of agents in the driver's own process, for a run on one machine without Ray.

One thread runs all agents. Their fork servers are processes, which end when this process does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from raylaunch.cluster.agent.agent import Agent, Home
from raylaunch.cluster.fleet.allocator import (
    AnnounceNode,
    FleetBase,
    ReleaseSlot,
    Request,
    ReserveGang,
    ReserveSlot,
    StartAgent,
    StopAgent,
)
from raylaunch.cluster.fleet_api import AgentLost, FleetFailed, ReportReceived, SlotGranted, Tell
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.local.local_machine import Gpus
from raylaunch.core.environ import snapshot
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.plan import Bundle, Plan
from raylaunch.core.text import count
from raylaunch.errors import ClusterError
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.node_goal import Order, StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec

_Answer = TypeVar("_Answer")

_CLOSE_SECONDS = 20.0
"""A little more than an agent takes to kill processes that ignore signals."""
_GIVE_SECONDS = 60.0
"""How long an agent that has left gives what it holds: as long as the subreaper of one that was killed."""
STALL_SECONDS = 5.0
"""How long the thread may do nothing, as in a file system that does not answer, when the run is to end."""
_STALLED = "its thread does nothing: a file system may not answer"
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class _LocalAgent:
    agent: Agent
    #: Calls `next_report` again and again.
    reports: asyncio.Task[None]


class LocalFleet(FleetBase):
    """The agents of a run without Ray. Everything but what the driver waits for happens in one thread."""

    def __init__(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None], gpus: Gpus) -> None:
        """`say` takes a line for a person, in the thread that calls the fleet."""
        super().__init__(plan, spec, say)
        self._room = LocalSlots(gpus)
        self._agents: dict[NodeId, _LocalAgent] = {}
        #: Agents that start as soon as their slots are granted, by slot.
        self._waiting: dict[int, StartAgent] = {}
        #: Those that are to end, but not what they hold.
        self._givers: set[NodeId] = set()
        self._to_do: asyncio.Queue[Request | None] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="raylaunch-agents")

    def start(self, tell: Tell) -> None:
        """Start the thread, and at once all agents for which this machine has resources."""
        self._tell = tell
        self._loop.set_exception_handler(lambda _, context: self._failed(context["message"]))
        self._thread.start()
        self._decide(self._allocator.start)
        self._loop.call_soon_threadsafe(self._loop.create_task, self._work())

    # What is asked of the thread.

    def _put(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._to_do.put_nowait, request)

    def send(self, node: NodeId, order: Order) -> None:
        """Let the thread hand the order to the agent. Where it does not, and workers are to end, the agent is lost."""
        self._loop.call_soon_threadsafe(self._handle, node, order)
        if isinstance(order, StopWorkers) and order.grace > 0:
            watch = threading.Thread(target=self._report_stall, args=(node,), daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                watch.start()

    def _report_stall(self, node: NodeId) -> None:
        if self._is_stalled():
            self._tell(AgentLost(node=node, why=_STALLED))

    def _is_stalled(self) -> bool:
        alive = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(alive.set)
            # In parts: the whole process may have been stopped meanwhile.
            return not any(alive.wait(STALL_SECONDS / 5) for _ in range(5))
        return False

    def _handle(self, node: NodeId, order: Order) -> None:
        local = self._agents.get(node)
        if local is None:
            return
        try:
            local.agent.handle(order)
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)

    # What is heard.

    async def _report_loop(self, node: NodeId, agent: Agent) -> None:
        try:
            while True:
                report = await agent.next_report()
                self._tell(ReportReceived(node=node, report=report, at=time.monotonic()))
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)

    def _gone(self, node: NodeId, error: BaseException) -> None:
        self._tell(AgentLost(node=node, why=f"{type(error).__name__}: {error}", error=error))

    def _failed(self, why: str, cause: BaseException | None = None) -> None:
        """Report an error that is no single agent's: none of them can go on."""
        error = ClusterError(f"the agents on this machine cannot go on: {why}")
        error.__cause__ = cause  # the hint for a person depends on it
        self._tell(FleetFailed(error=error))

    # Which nodes there are.

    def release(self, node: NodeId, *, frees_memory: bool = False) -> None:
        """End what the agent started, and start another in its slot.

        `frees_memory`: end the agent, too; else it gives what it holds to others for a minute.
        """
        if not frees_memory:
            self._givers.add(node)
        pause = self._decide(partial(self._allocator.lost, node))
        if pause:
            self._say(f"{node} is given up: the next agent is started in {count(pause, 'second')}")

    def replace(self, gone: AgentLost) -> None:
        """Raise ClusterError: an agent that fails in this process would fail again."""
        if gone.error is not None:
            fails = "cannot go on" if self._allocator.slots.is_up(gone.node) else "cannot start"
            raise ClusterError(f"the agent of {gone.node} {fails}: {gone.why}") from gone.error

    # What is done about it, in the thread.

    async def _work(self) -> None:
        try:
            while True:
                timer, idle = None, self._idle_seconds()
                if idle < math.inf:
                    timer = self._loop.call_later(idle, self._to_do.put_nowait, None)
                request = await self._to_do.get()
                if timer is not None:
                    timer.cancel()
                if request is None:
                    self._decide(self._allocator.tick)
                else:
                    await self._do(request)
        except Exception as error:  # noqa: BLE001
            self._failed(f"{type(error).__name__}: {error}", error)

    async def _do(self, request: Request) -> None:
        match request:
            case ReserveGang():
                for slot, bundle in request.bundles.items():
                    self._room.request(slot, bundle)
                await self._grant()
            case ReserveSlot():
                if local_machine.HOST_ID not in request.avoid:
                    self._room.request(request.slot, request.bundle)
                    await self._grant()
            case StartAgent():
                self._waiting[request.slot] = request
                await self._start_agent(request.slot)
            case AnnounceNode():
                self._tell(SlotGranted(node=request.node, host=request.host, address=local_machine.LOOPBACK))
            case StopAgent():
                await self._end(request)
            case ReleaseSlot():
                self._waiting.pop(request.slot, None)
                self._room.release(request.slot)
                await self._grant()

    async def _grant(self) -> None:
        granted = self._room.grant()
        if granted:
            self._decide(partial(self._allocator.granted, dict.fromkeys(granted, local_machine.HOST_ID)))
        for slot in granted:
            await self._start_agent(slot)

    async def _start_agent(self, slot: int) -> None:
        """Start the agent of a slot, if the slot is granted and has one that waits."""
        if not self._room.is_granted(slot) or slot not in self._waiting:
            return
        request = self._waiting.pop(slot)
        spec = self._spec_for(request)
        environ = {**snapshot(os.environ), **self._room.environ(slot)}
        home = Home(host=local_machine.HOST_ID, address=local_machine.LOOPBACK, environ=environ)
        try:
            agent = Agent(spec, home)
        except Exception as error:  # noqa: BLE001
            self._gone(request.node, error)
        else:
            self._agents[request.node] = _LocalAgent(
                agent, self._loop.create_task(self._report_loop(request.node, agent))
            )

    async def _end(self, request: StopAgent) -> None:
        """End an agent. Its slot and GPUs are free only when everything that it started is gone."""
        self._waiting = {slot: one for slot, one in self._waiting.items() if one.node != request.node}
        if request.why:
            self._tell(AgentLost(node=request.node, why=request.why))
        if request.node in self._givers and request.node in self._agents:
            self._givers.discard(request.node)
            await self._agents[request.node].agent.end_processes()
            self._loop.call_later(_GIVE_SECONDS, self._to_do.put_nowait, replace(request, why=""))
        elif (local := self._agents.pop(request.node, None)) is not None:
            await _ended(local)

    def logs(self, node: NodeId, asked: LogQuery | LogRead) -> concurrent.futures.Future[LogAnswer]:
        """Ask the agent, in the thread."""
        return self._ask(node, lambda agent: agent.logs(asked))

    def _ask(self, node: NodeId, ask: Callable[[Agent], Awaitable[_Answer]]) -> concurrent.futures.Future[_Answer]:
        async def asked() -> _Answer:
            if (local := self._agents.get(node)) is None:
                raise LookupError("it has no agent any more")
            return await ask(local.agent)

        return asyncio.run_coroutine_threadsafe(asked(), self._loop)

    # The end.

    def ask(self, capability: str, node: NodeId) -> concurrent.futures.Future[bytes]:
        """Ask the agent, in the thread."""
        return self._ask(node, lambda agent: agent.ask(capability))

    def read_result(self, node: NodeId, rank: int, offset: int) -> concurrent.futures.Future[bytes]:
        """Ask the agent, in the thread."""
        return self._ask(node, lambda agent: agent.read_result(rank, offset))

    def make_idle(self) -> None:
        """Do nothing: agents in this process end with the run."""

    def close(self) -> None:
        """Make each agent end its processes, and wait for that, for seconds at most."""
        if self._thread.ident is None:
            return
        if self._is_stalled():
            return  # it ends with this process
        wait = _CLOSE_SECONDS
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(wait)
        except concurrent.futures.TimeoutError:
            wait = 0.0  # the thread is stuck, perhaps in a file system that does not answer; it ends with this process
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(wait)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        agents, self._agents = [*self._agents.values()], {}
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*map(_ended, agents), return_exceptions=True)


async def _ended(local: _LocalAgent) -> None:
    local.reports.cancel()
    await local.agent.close()


class LocalSlots:
    """Grants slots as long as there are GPUs for them. CPUs are not counted, since workers may share them."""

    def __init__(self, found: Gpus) -> None:
        self._gpus = found
        self._pending: dict[int, Bundle] = {}
        #: By granted slot: the ids of its GPUs, and which part of each it may use.
        self._granted: dict[int, tuple[tuple[str, ...], float]] = {}

    def request(self, slot: int, bundle: Bundle) -> None:
        """Request a slot; `grant` grants it."""
        self._pending[slot] = bundle

    def grant(self) -> list[int]:
        """Grant what can be granted now; return those slots."""
        slots = []
        for slot, bundle in list(self._pending.items()):
            part, wanted = min(bundle.gpus, 1.0), math.ceil(bundle.gpus)
            free = [gpu for gpu in self._gpus.ids if self._taken(gpu) + part <= 1 + _ROUNDING]
            if wanted <= len(free):
                free.sort(key=self._taken, reverse=True)  # parts go where others are, so that whole GPUs stay free
                del self._pending[slot]
                self._granted[slot] = tuple(free[:wanted]), part
                slots.append(slot)
        return slots

    def _taken(self, gpu: str) -> float:
        return sum(part for gpus_of_slot, part in self._granted.values() if gpu in gpus_of_slot)

    def is_granted(self, slot: int) -> bool:
        """Return whether the slot is granted."""
        return slot in self._granted

    def release(self, slot: int) -> None:
        """Release a slot, granted or pending. Its GPUs are free again."""
        self._pending.pop(slot, None)
        self._granted.pop(slot, None)

    def environ(self, slot: int) -> Mapping[str, str]:
        """Return the environment variables by which the slot's agent finds its GPUs."""
        return local_machine.gpus_environ(self._gpus, self._granted[slot][0])
