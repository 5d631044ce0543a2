"""The agent as a Ray actor. It may serve one run after the other, and be idle in between."""

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

from raylaunch.cluster.agent import agent
from raylaunch.cluster.agent.agent import AgentSpec, Home
from raylaunch.cluster.agent.lease import end_this_process
from raylaunch.cluster.agent.link import Link, LinkAddress
from raylaunch.node.linux import interfaces, processes
from raylaunch.node.protocol.messages import Order
from raylaunch.node.supervisor.forkserver_client import ForkServerClient

CLOSE_SECONDS = 7.0
_KILL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAgent:
    """An agent of which only the fork server is left: its process id, and the memory that it uses."""

    pid: int
    memory: int
    """Bytes (PSS: shared pages are divided among their users); 0: not known."""


class AgentActor:
    """One for each node of the run."""

    def __init__(self, spec: AgentSpec) -> None:
        processes.reset_niceness()  # workers that use all CPUs must not delay its reports
        self._home = _home()
        self._agent = agent.Agent(spec, self._home)
        #: While the agent is idle.
        self._client: ForkServerClient | None = None
        #: To the process that pools the agent, while it is idle.
        self._link: Link | None = None

    async def next_report(self) -> bytes:
        """Return the next `AgentReport`, pickled: Ray's own serialization costs a driver of 1,000 nodes far more."""
        return pickle.dumps(await self._agent.next_report())

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def handle(self, pickled: bytes) -> None:
        """Carry out one pickled `Order`. `next_report` raises its errors, since nobody waits for this call."""
        order: Order = pickle.loads(pickled)  # noqa: S301
        try:
            self._agent.handle(order)
        except Exception as error:  # noqa: BLE001
            self._agent.fail(error)

    async def values(self) -> dict[int, bytes]:
        """Return what functions returned, pickled, by rank."""
        return await self._agent.values()

    async def become_idle(self, name: str, link_address: LinkAddress | None, seconds: float) -> IdleAgent | None:
        """End the run, so that another can `reuse` the agent within so many seconds. None: it cannot be reused.

        `name` and `link_address`: those of a link to the process that pools the agent, whose end is the agent's too.
        """
        link = Link(link_address, name, end_this_process) if link_address is not None else None
        self._client = await self._agent.become_idle(seconds)
        if self._client is None:
            return None
        self._link = link
        return IdleAgent(pid=self._client.pid, memory=self._client.memory())

    async def reuse(self, spec: AgentSpec) -> bool:
        """Begin another run. False: the fork server cannot be used any more."""
        client = self._client
        if client is None or not await asyncio.to_thread(client.activate):
            return False
        before, self._agent = self._agent, agent.Agent(spec, self._home, client)
        self._client = None
        before.retire()
        if self._link is not None:
            self._link.release()
        return True

    async def close(self) -> None:
        """End every process on this node."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
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
    """Return the node's address as Ray knows it, as a number: other nodes may not resolve a name."""
    return next(
        (one for one in interfaces.resolve(address) if one == address or not interfaces.is_loopback(one)), address
    )


def close(actors: Sequence[Any]) -> None:
    """Have agents end their processes, and wait for that, for seconds at most."""
    if actors:
        with contextlib.suppress(RayError):
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)


def kill(actors: Sequence[Any], then: Callable[[], None] = lambda: None) -> None:
    """Kill the processes of agents. Waits for Ray, which may be gone, for seconds at most."""

    def work() -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor)
        then()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_KILL_SECONDS)


def dismiss(actors: Sequence[Any]) -> None:
    """Close agents and then kill them, in a thread of its own: closing may take long."""

    def work() -> None:
        close(actors)
        kill(actors)

    threading.Thread(target=work, daemon=True).start()


def actor_class() -> Any:
    """Return the actor class. Actors are not restarted: a new agent is a new node of the run."""
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(AgentActor)
