"""The agent on each node: a thin door to the node's supervisor. Its process imports no torch, and it knows no Ray."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raylaunch.cluster.lease import Lease, end_this_process
from raylaunch.cluster.lifeline import Anchor, Line
from raylaunch.cluster.outbox import Outbox
from raylaunch.cluster.silence import beat
from raylaunch.cluster.tailing import Tailing
from raylaunch.core.contract import LAYOUTS
from raylaunch.core.environment import base_env
from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.job import NodeRule
from raylaunch.core.pulse import Pulse
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.core.rules import Place, matching
from raylaunch.core.streams import View
from raylaunch.node import interfaces, messages, processes
from raylaunch.node.hearth import Hearth
from raylaunch.node.logs import Output, sources
from raylaunch.node.settings import NodeSettings
from raylaunch.node.supervisor import Event, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is told at its start. The environment and the folder are the submitter's, adapted on the node."""

    settings: NodeSettings
    address: str | None
    """Where the node's store listens; None: the node's own address, as its cluster knows it."""
    nproc: int
    """Workers of this agent; each has its own number."""
    rules: dict[str, NodeRule]
    submitter_env: dict[str, str] = field(repr=False)
    cwd: str | None
    """None: where Ray unpacked the working folder."""
    ray_address: str
    """Where scripts find Ray; `""`: there is none, and the environment is not touched."""
    view: View
    """What of the workers' output is wanted."""
    node_timeout: float
    """When nothing was heard of the driver for as long, the node ends everything it has of the run. Infinity: never."""
    anchor: Anchor | None = None
    """Where the agent holds on to the driver; None: nowhere."""
    keep_warm: float = 0.0
    """Seconds that the agent rests after the run, for the next one; 0: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The machine that an agent is on, as its cluster knows it."""

    node_id: str
    address: str
    environ: Mapping[str, str]
    """What processes find there, before anything of the job's is added."""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUp:
    """The fork server is warm: the node can take part."""

    node_id: str
    address: str
    nproc: int
    ready: messages.Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Everything an agent has to say at one time, perhaps nothing: then that it is alive.

    `now` is its CLOCK_MONOTONIC, to compare the times in events with.
    """

    now: float
    events: list[AgentUp | Event] = field(default_factory=list)
    output: list[Output] = field(default_factory=list)
    pulse: Pulse | None = None
    """What the node's workers show of themselves."""


class Agent:
    """One for each node of the run. All methods return at once but `words`, which waits a beat for something to say."""

    def __init__(self, told: AgentSettings, home: Home, hearth: Hearth | None = None) -> None:
        """`hearth`: what the agent of an earlier run left here, whose settings were the same in all that counts."""
        self._node_id = home.node_id
        address = told.address or home.address
        place = Place(address=address, labels=home.labels, interfaces=interfaces.interfaces())
        env = base_env(
            home.environ,
            told.submitter_env,
            (told.settings.env, *(rule.env for rule in matching(told.rules, place).values())),
            place=place,
            nproc=told.nproc,
            ray_address=told.ray_address,
        )
        cwd = told.cwd or os.getcwd()
        if not os.path.isdir(cwd):
            msg = f"the folder {cwd} does not exist on the node {address}"
            raise FileNotFoundError(msg)
        self._view = told.view
        self._nproc = told.nproc
        self._address = address
        self._supervisor = Supervisor(replace(told.settings, address=address, env=env, cwd=cwd), hearth)
        self._supervisor.start()
        self._unsaid: Outbox[AgentUp | Event] = Outbox()
        self._something = asyncio.Event()
        self._mistake: Exception | None = None
        self._watched = False
        self._over = False
        self._tailing = Tailing(self._unsaid, self._tell)
        self._beat = beat(told.node_timeout)
        self._lease = Lease(told.node_timeout, self._supervisor.renew, end_this_process)
        self._lease.start()
        self._line = Line(told.anchor, told.settings.node, end_this_process) if told.anchor is not None else None

    async def words(self) -> Words:
        """Wait until there is something to say, for a beat at most. The driver always has one such call pending."""
        if self._over:
            return Words(now=time.monotonic())
        self._lease.called()
        if not self._watched:
            self._watched = True
            asyncio.get_running_loop().add_reader(self._supervisor.fileno(), self._hear)
        try:
            async with asyncio.timeout(self._beat):
                await self._something.wait()
        except TimeoutError:
            self._tailing.read()  # some file systems do not tell of what is written
        if self._over:
            return Words(now=time.monotonic())
        if self._mistake is not None:
            raise self._mistake
        self._something.clear()
        events, output = self._unsaid.take(more_output=self._tailing.behind)
        self._tailing.taken()
        self._tell()
        pulse = self._supervisor.pulse()
        if self._lease.over:
            await asyncio.Event().wait()  # for this process's end: what is said now could be about workers it ended
        self._lease.answering()
        return Words(now=time.monotonic(), events=events, output=output, pulse=pulse)

    async def launch(self, part: Assignment, meeting: Rendezvous) -> None:
        """Start this node's part of an attempt, ending what is left of those before."""
        self._supervisor.launch(part, meeting)
        told = self._supervisor.settings
        self._tailing.add(sources(self._view, part, LAYOUTS[told.layout], told.run_dir, kept=told.kept))

    async def stop(self, attempt: int, grace: float, signal: str) -> None:
        """End the attempt's workers."""
        self._supervisor.stop(attempt, grace, signal)

    async def forward(self, attempt: int, signal: str) -> None:
        """Send the attempt's workers a signal that is not ours."""
        self._supervisor.forward(attempt, signal)

    async def ask_checkpoint(self, attempt: int, step: int) -> None:
        """Propose to the attempt's workers to save after that step; `Proposed` follows, then `WorkersCheckpointed`."""
        self._supervisor.ask_checkpoint(attempt, step)

    async def settle(self, attempt: int, step: int) -> None:
        """They save at the step that was proposed to them."""
        self._supervisor.settle(attempt, step)

    async def dump_stacks(self, attempt: int) -> None:
        """Ask the attempt's workers what they are doing; `WorkersStacks` follows."""
        self._supervisor.dump_stacks(attempt)

    async def open_store(self, attempt: int) -> None:
        """Have a store ready for the attempt."""
        self._supervisor.open_store(attempt)

    async def values(self) -> dict[int, bytes]:
        """What functions returned, pickled, by rank."""
        return self._supervisor.values()

    async def rest(self, seconds: float) -> Hearth | None:
        """End all of the run but what the next one may use; None: there is nothing left.

        Unless there is a next one within so many seconds, this process ends.
        """
        self._over = True
        self._something.set()
        self._lease.rest(seconds)
        self._look_away()
        hearth = await asyncio.get_running_loop().run_in_executor(None, self._supervisor.rest)
        if hearth is not None and self._line is not None:
            self._line.release()
        return hearth

    def retire(self) -> None:
        """Another agent took over what this one left."""
        self._lease.release()

    async def close(self) -> None:
        """End every process on this node."""
        self._lease.farewell()
        self._look_away()
        await asyncio.get_running_loop().run_in_executor(None, self._supervisor.close)

    def _look_away(self) -> None:
        self._tailing.close()
        if self._watched:
            self._watched = False
            asyncio.get_running_loop().remove_reader(self._supervisor.fileno())

    def mistaken(self, error: Exception) -> None:
        """A mistake of ours: the next `words` tells the driver, which has no other way to hear of it."""
        self._mistake = error
        self._something.set()

    def _hear(self) -> None:
        try:
            events = self._supervisor.poll()
        except Exception as error:  # noqa: BLE001
            self.mistaken(error)
            return
        for event in events:
            ended = _ended(event)
            if ended is not None:
                self._tailing.end(ended)
            last = ended is not None and not isinstance(event, WorkersStarted)
            self._unsaid.put(self._up(event) if isinstance(event, messages.Ready) else event, last=last)
        if any(isinstance(event, WorkersStarted | WorkersExited | WorkersStopped) for event in events):
            self._tailing.read()  # a worker's last output comes before the word of its end
        self._tell()

    def _up(self, ready: messages.Ready) -> AgentUp:
        processes.give_back_memory()  # from here on this process waits, for days perhaps
        return AgentUp(node_id=self._node_id, address=self._address, nproc=self._nproc, ready=ready)

    def _tell(self) -> None:
        if self._unsaid.has_some(more_output=self._tailing.behind):
            self._something.set()


def _ended(event: Event) -> int | None:
    """The attempt of which nothing more will be written, as this event says."""
    match event:
        case WorkersStarted():
            return event.attempt - 1  # whose workers were gone before these were started
        case WorkersStopped() | WorkersExited(failures=()):
            return event.attempt
        case _:
            return None
