"""The Ray actor on each node: a thin door to the node's supervisor. Its process imports no torch."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raylaunch.core.environment import base_env
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.node import messages, processes
from raylaunch.node.logs import Output, Tails
from raylaunch.node.supervisor import Event, NodeSettings, Supervisor

_TAIL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is told at its start. The environment and the folder are the submitter's, adapted on the node."""

    settings: NodeSettings
    address: str | None
    """Where the node's store listens; None: the node's own address, as Ray knows it."""
    nproc: int
    submitter_env: dict[str, str]
    cwd: str | None
    """None: where Ray unpacked the working folder."""
    ray_address: str
    shown: frozenset[int] | None
    """Ranks whose output is wanted; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUp:
    """The fork server is warm: the node can take part."""

    node_id: str
    address: str
    nproc: int
    ready: messages.Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Everything an agent has to say at one time. `now` is its CLOCK_MONOTONIC, to compare the times in events with."""

    now: float
    events: list[AgentUp | Event] = field(default_factory=list)
    output: list[Output] = field(default_factory=list)


class Agent:
    """One for each node of the run. All methods return at once but `words`, which waits for something to say."""

    def __init__(self, told: AgentSettings) -> None:
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        address = told.address or ray.util.get_node_ip_address()
        env = base_env(
            os.environ, told.submitter_env, told.settings.env, nproc=told.nproc, ray_address=told.ray_address
        )
        cwd = told.cwd or os.getcwd()
        if not os.path.isdir(cwd):
            msg = f"the folder {cwd} does not exist on the node {address}"
            raise FileNotFoundError(msg)
        self._shown = told.shown
        self._nproc = told.nproc
        self._address = address
        self._supervisor = Supervisor(replace(told.settings, address=address, env=env, cwd=cwd))
        self._supervisor.start()
        self._unsaid = Words(now=0.0)
        self._something = asyncio.Event()
        self._mistake: Exception | None = None
        self._watched = False
        self._tails: Tails | None = None
        self._tailing: asyncio.Task[None] | None = None

    async def words(self) -> Words:
        """Wait until there is something to say, and say all of it. The driver always has one such call pending."""
        if not self._watched:
            self._watched = True
            asyncio.get_running_loop().add_reader(self._supervisor.fileno(), self._hear)
        await self._something.wait()
        if self._mistake is not None:
            raise self._mistake
        self._something.clear()
        said, self._unsaid = self._unsaid, Words(now=0.0)
        return replace(said, now=time.monotonic())

    async def launch(self, part: Assignment, meeting: Rendezvous) -> None:
        """Start this node's part of an attempt, ending what is left of those before."""
        self._drain()
        self._supervisor.launch(part, meeting)
        shown = [rank for rank in part.ranks if self._shown is None or rank in self._shown]
        self._tails = Tails(self._supervisor.settings.run_dir, part.attempt, shown) if shown else None
        if self._tails is not None and self._tailing is None:
            self._tailing = asyncio.get_running_loop().create_task(self._tail())

    async def stop(self, attempt: int, grace: float) -> None:
        """End the attempt's workers."""
        self._supervisor.stop(attempt, grace)

    async def open_store(self, attempt: int) -> None:
        """Have a store ready for the attempt."""
        self._supervisor.open_store(attempt)

    async def values(self) -> dict[int, bytes]:
        """What functions returned, pickled, by rank."""
        return self._supervisor.values()

    async def close(self) -> None:
        """End every process on this node."""
        if self._tailing is not None:
            self._tailing.cancel()
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._supervisor.fileno())
        await asyncio.get_running_loop().run_in_executor(None, self._supervisor.close)

    def _hear(self) -> None:
        try:
            events = self._supervisor.poll()
        except Exception as error:  # noqa: BLE001
            self._mistake = error  # ours; the next `words` tells the driver, which has no other way to hear of it
            self._something.set()
            return
        if any(not isinstance(event, messages.Ready | messages.StoreOpen) for event in events):
            self._drain()  # a worker's last output comes before the word of its end
        for event in events:
            self._unsaid.events.append(self._up(event) if isinstance(event, messages.Ready) else event)
        if events:
            self._something.set()

    def _up(self, ready: messages.Ready) -> AgentUp:
        processes.give_back_memory()  # from here on this process waits, for days perhaps
        return AgentUp(node_id=self._node_id, address=self._address, nproc=self._nproc, ready=ready)

    async def _tail(self) -> None:
        while True:
            await asyncio.sleep(_TAIL_SECONDS)
            self._take(self._tails.read() if self._tails is not None else [])

    def _drain(self) -> None:
        self._take(self._tails.read(to_the_end=True) if self._tails is not None else [])

    def _take(self, output: list[Output]) -> None:
        if output:
            self._unsaid.output.extend(output)
            self._something.set()


def actor_class() -> Any:
    """The agent as Ray wants it: one life, since its successor is a new node to the machine."""
    return ray.remote(max_restarts=0, max_task_retries=0)(Agent)
