"""Agents in the driver's own process, where there is one machine only: what the seats say is to be done, done here.

One thread runs them all. What they start are processes, as everywhere: fork servers that end when this process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from raylaunch.cluster import here, warm
from raylaunch.cluster.agent import Agent, AgentSettings, Home
from raylaunch.cluster.deeds import Announce, Ask, AskGang, Deed, End, GiveBack, Man
from raylaunch.cluster.fleet import Gone, Granted, Heard, Hopeless, Tell
from raylaunch.cluster.gpus import Gpus
from raylaunch.cluster.room import Room
from raylaunch.cluster.seated import SeatedFleet
from raylaunch.cluster.warm import Key, Pool, Rester
from raylaunch.core.plan import Plan
from raylaunch.core.words import count
from raylaunch.errors import ClusterError
from raylaunch.node.hearth import Hearth

_CLOSE_SECONDS = 20.0
"""A little more than agents take to end what does not want to end."""


@dataclass(frozen=True, slots=True)
class _Posted:
    agent: Agent
    #: Its unending conversation with the driver.
    talk: asyncio.Task[None]
    #: Which later agent may have what it leaves.
    key: Key


class LocalFleet(SeatedFleet):
    """Everything but the driver's questions happens in the thread."""

    def __init__(
        self, plan: Plan, told: AgentSettings, say: Callable[[str], None], gpus: Gpus, pool: Pool | None = None
    ) -> None:
        """`say`: takes a line for a person, in the thread that calls us. `pool`: what agents leave for the next run."""
        super().__init__(plan, told, say)
        self._room = Room(gpus)
        self._pool = pool
        self._agents: dict[str, _Posted] = {}
        #: Agents that are to start as soon as there is room, by seat.
        self._waiting: dict[int, Man] = {}
        self._to_do: asyncio.Queue[Deed] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="raylaunch-agents")

    def start(self, tell: Tell) -> None:
        """All that there is room for start at once."""
        self._tell = tell
        self._loop.set_exception_handler(lambda _, context: self._failed(context["message"]))
        self._thread.start()
        self._decide(self._seats.start)
        self._in_thread(self._work())

    # What is asked of the thread.

    def _put(self, deed: Deed) -> None:
        self._loop.call_soon_threadsafe(self._to_do.put_nowait, deed)

    def _order(self, node: str, name: str, *args: Any) -> None:
        """One call."""
        self._in_thread(self._obey(node, name, *args))

    async def _obey(self, node: str, name: str, *args: Any) -> None:
        posted = self._agents.get(node)
        if posted is None:
            return
        try:
            await getattr(posted.agent, name)(*args)
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)

    def _in_thread(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.create_task, work)

    # What is heard.

    async def _talk(self, node: str, agent: Agent) -> None:
        try:
            while True:
                words = await agent.words()
                self._tell(Heard(node=node, words=words, at=time.monotonic()))
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)

    def _gone(self, node: str, error: BaseException) -> None:
        self._tell(Gone(node=node, why=f"{type(error).__name__}: {error}", error=error))

    def _failed(self, why: str) -> None:
        """Something that is no agent's own: none of them can be relied on."""
        self._tell(Hopeless(error=ClusterError(f"the agents on this machine cannot go on: {why}")))

    # Which nodes there are.

    def release(self, node: str) -> None:
        """End the agent and what it started; another starts in its place."""
        pause = self._decide(partial(self._seats.lost, node))
        if pause:
            self._say(f"{node} is given up: the next agent is started in {count(pause, 'second')}")

    def replace(self, gone: Gone) -> None:
        """Nobody is: an agent that fails in this process would fail again."""
        if gone.error is not None:
            fails = "cannot go on" if gone.node in self._up else "cannot start"
            raise ClusterError(f"the agent of {gone.node} {fails}: {gone.why}") from gone.error

    # What is done about it, in the thread.

    async def _work(self) -> None:
        try:
            await self._do_all()
        except Exception as error:  # noqa: BLE001
            self._failed(f"{type(error).__name__}: {error}")

    async def _do_all(self) -> None:
        while True:
            wake = self._wake(now := time.monotonic())
            try:
                async with asyncio.timeout(None if wake is None else max(0.0, wake - now)):
                    deed = await self._to_do.get()
            except TimeoutError:
                self._decide(self._seats.tick)
            else:
                await self._do(deed)

    async def _do(self, deed: Deed) -> None:
        match deed:
            case AskGang():
                for seat, bundle in deed.bundles.items():
                    self._room.ask(seat, bundle)
                await self._grant()
            case Ask():
                if here.NODE_ID not in deed.off:
                    self._room.ask(deed.seat, deed.bundle)
                    await self._grant()
            case Man():
                self._waiting[deed.seat] = deed
                await self._man(deed.seat)
            case Announce():
                self._tell(Granted(node=deed.node, host=deed.host, address=here.LOOPBACK))
            case End():
                await self._end(deed)
            case GiveBack():
                self._waiting.pop(deed.seat, None)
                self._room.give_back(deed.seat)
                await self._grant()

    async def _grant(self) -> None:
        granted = self._room.grant()
        if granted:
            self._decide(partial(self._seats.granted, dict.fromkeys(granted, here.NODE_ID)))
        for seat in granted:
            await self._man(seat)

    async def _man(self, seat: int) -> None:
        """Start who is to be there, if there is room."""
        if not self._room.holds(seat) or seat not in self._waiting:
            return
        deed = self._waiting.pop(seat)
        told = self._settings(deed)
        environ = {**os.environ, **self._room.environ(seat)}
        home = Home(node_id=here.NODE_ID, address=here.LOOPBACK, environ=environ)
        key = {**warm.key(told), "environ": warm.lasting_env(environ)}
        hearth = await self._left(key)
        try:
            agent = Agent(told, home, hearth)
        except Exception as error:  # noqa: BLE001
            self._gone(deed.node, error)
            if hearth is not None:
                await asyncio.to_thread(hearth.close)
        else:
            self._agents[deed.node] = _Posted(agent, self._loop.create_task(self._talk(deed.node, agent)), key)

    async def _left(self, key: Key) -> Hearth | None:
        """What the agent of an earlier run has left for one like this, if it is still good."""
        hearth: Hearth | None = self._pool.take(here.NODE_ID, key) if self._pool is not None else None
        if hearth is None or await asyncio.to_thread(hearth.wake):
            return hearth
        await asyncio.to_thread(hearth.close)
        return None

    async def _end(self, deed: End) -> None:
        """Only when all is gone that it started, its place and its GPUs are somebody else's."""
        self._up.discard(deed.node)
        self._waiting = {seat: man for seat, man in self._waiting.items() if man.node != deed.node}
        if deed.why:
            self._tell(Gone(node=deed.node, why=deed.why))
        posted = self._agents.pop(deed.node, None)
        if posted is not None:
            await _ended(posted)

    # The end.

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        """Collect the results of the last attempt."""
        return asyncio.run_coroutine_threadsafe(self._values([*nodes]), self._loop).result()

    async def _values(self, nodes: list[str]) -> dict[int, bytes]:
        parts = [await self._agents[node].agent.values() for node in nodes if node in self._agents]
        return {rank: value for part in parts for rank, value in part.items()}

    def rest(self) -> None:
        """Agents end here; what they leave is for those of the next run, where that is wanted."""
        if self._pool is not None:
            resting = asyncio.run_coroutine_threadsafe(self._rest(), self._loop).result()
            self._pool.put(resting, self._told.keep_warm)

    async def _rest(self) -> list[Rester]:
        agents = [self._agents.pop(node) for node in [*self._agents] if node in self._up]
        for posted in agents:
            posted.talk.cancel()
        left = await asyncio.gather(*(posted.agent.rest(self._told.keep_warm) for posted in agents))
        return [
            Rester(
                name="",
                agent=hearth,
                key=posted.key,
                host=here.NODE_ID,
                address=here.LOOPBACK,
                nproc=posted.key["nproc"],
                pid=hearth.pid,
                memory=hearth.memory(),
            )
            for posted, hearth in zip(agents, left, strict=True)
            if hearth is not None
        ]

    def close(self) -> None:
        """Have each agent end its processes, and wait for that."""
        if self._thread.ident is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        agents, self._agents = [*self._agents.values()], {}
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*map(_ended, agents), return_exceptions=True)


async def _ended(posted: _Posted) -> None:
    posted.talk.cancel()
    await posted.agent.close()
