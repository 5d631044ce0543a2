"""The agent as a Ray actor: where it is, Ray tells it. It may serve one run after the other, and rest in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raylaunch.cluster import agent
from raylaunch.cluster.agent import AgentSettings, Home
from raylaunch.cluster.lease import end_this_process
from raylaunch.cluster.lifeline import Anchor, Line
from raylaunch.node import interfaces, processes
from raylaunch.node.hearth import Hearth

_CLOSE_SECONDS = 7.0
_KILL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rested:
    """Nothing of the run is left at an agent but its fork server: its process id, and the memory it takes."""

    pid: int
    memory: int
    """Bytes, what it shares with others counted in part; 0: not known."""


class Agent:
    """One for each node of the run."""

    def __init__(self, told: AgentSettings) -> None:
        processes.be_as_nice_as_others()  # workers that take all CPUs must not keep its beat from the driver
        self._home = _home()
        self._agent = agent.Agent(told, self._home)
        self._hearth: Hearth | None = None
        #: To the driver, while no run has one of its own.
        self._line: Line | None = None

    async def words(self) -> bytes:
        """What the node has to say: `Words`, pickled; Ray's own way costs a driver of a thousand nodes far more."""
        return pickle.dumps(await self._agent.words())

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def order(self, order: bytes) -> None:
        """An order for the node, pickled: the name of a method of the agent's, and what it takes."""
        name, args = pickle.loads(order)  # noqa: S301
        try:
            await getattr(self._agent, name)(*args)
        except Exception as error:  # noqa: BLE001
            self._agent.mistaken(error)

    async def values(self) -> dict[int, bytes]:
        """What functions returned, pickled, by rank."""
        return await self._agent.values()

    async def rest(self, name: str, anchor: Anchor | None, seconds: float) -> Rested | None:
        """The run is over, and another may `take_up` what it leaves, within so many seconds. None: it leaves nothing.

        `name`: for the driver, who is to know when this process ends, as this process when the driver does.
        """
        line = Line(anchor, name, end_this_process) if anchor is not None else None
        self._hearth = await self._agent.rest(seconds)
        if self._hearth is None:
            return None
        self._line = line
        return Rested(pid=self._hearth.pid, memory=self._hearth.memory())

    async def take_up(self, told: AgentSettings) -> bool:
        """Begin another run. False: what there was is of no use any more."""
        hearth = self._hearth
        if hearth is None or not await asyncio.to_thread(hearth.wake):
            return False
        before, self._agent = self._agent, agent.Agent(told, self._home, hearth)
        self._hearth = None
        before.retire()
        if self._line is not None:
            self._line.release()
        return True

    async def close(self) -> None:
        """End every process on this node."""
        if self._hearth is not None:
            await asyncio.to_thread(self._hearth.close)
        else:
            await self._agent.close()


def _home() -> Home:
    context = ray.get_runtime_context()
    return Home(
        node_id=context.get_node_id(),
        address=_numeric(ray.util.get_node_ip_address()),
        environ=dict(os.environ),
        labels=context.get_node_labels(),
    )


def _numeric(address: str) -> str:
    """The node's address as Ray knows it. A name, should it be one, may mean nothing to the other nodes."""
    return next(
        (one for one in interfaces.resolved(address) if one == address or not interfaces.is_loopback(one)), address
    )


def close(actors: Sequence[Any]) -> None:
    """Have them end their processes, and wait for that, within seconds."""
    if actors:
        with contextlib.suppress(RayError):
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_SECONDS)


def kill(actors: Sequence[Any], then: Callable[[], None] = lambda: None) -> None:
    """End their processes, whatever they are doing. Waits for Ray for seconds at most, which may be gone."""

    def work() -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor)
        then()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_KILL_SECONDS)


def dismiss(actors: Sequence[Any]) -> None:
    """End them and their processes in good order, which may take long; nobody waits for it."""

    def work() -> None:
        close(actors)
        kill(actors)

    threading.Thread(target=work, daemon=True).start()


def actor_class() -> Any:
    """The agent as Ray wants it: one life, since its successor is a new node to the machine."""
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(Agent)
