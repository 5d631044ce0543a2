"""The seam between the kernel and its capabilities: what each of them may use, and what it hears of.

The kernel starts, supervises, restarts and resizes workers. Everything else is a `Capability`, with a part in the
driver's process (`DriverPart`) and one in each agent (`AgentPart`). The driver's part shows a node its section of the
goal, and the agent's part tells its section of the status. Both are bytes, which only the capability reads. As in all
goals and statuses, the newest counts: a section says what should be, or what is, and may be lost or come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from raylaunch.core.machine.events_and_actions import Event, WorkersStarted
from raylaunch.core.machine.machine import Machine
from raylaunch.core.monitoring.rank_progress import RankProgress, WorldProgress
from raylaunch.core.newtypes import HostId, NodeId, RunTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.logs.tail import LogOutput
from raylaunch.node.protocol.node_goal import Order
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.protocol.node_status import StacksDumped
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.worker.runtime.spec import WorkerSpec

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPort:
    """What a capability may use in the driver's process."""

    machine: Machine
    """To look at: only events change it."""
    send: Callable[[NodeId, Order], None]
    """Send an order of the kernel's to a node."""
    show: Callable[[NodeId, bytes], None]
    """Show a node the capability's section of its goal, in place of the last one. It is sent at once."""
    ask: Callable[[NodeId], Future[bytes]]
    """Ask the capability's part on a node. LookupError is the future's for a node without agent."""
    call: Callable[[Callable[[], None]], None]
    """Have the driver's loop call this. Any thread may call it."""
    say: Callable[[str], None]
    """Print a line to the person."""
    progress: Callable[[], WorldProgress]
    """Return what heartbeats tell of the workers of the present attempt."""
    write_stacks: Callable[[int, str], None]
    """Keep what the workers of an attempt were doing, as text, in the run folder."""


class DriverPart(Protocol):
    """A capability in the driver's process. All is called in the thread of the driver's loop, and returns at once.

    A part inherits from this class, and has the methods that it needs.
    """

    def running(self) -> AbstractContextManager[None]:
        """Return what is entered for as long as the driver's loop runs."""
        return nullcontext()

    @property
    def next_check(self) -> float:
        """When to call `due_events` next, in seconds since the run began."""
        return NEVER

    def due_events(self, now: RunTime) -> Iterable[Event]:
        """Do what is due, and return events for the machine."""
        del now
        return ()

    def holds(self, event: Event, now: RunTime) -> bool:
        """Take an event before the machine does. True: it must not have it yet. `due_events` will return it."""
        del event, now
        return False

    def launched(self, now: RunTime) -> None:
        """Learn that an attempt begins, or that this driver takes it over.

        What a node is shown now, its agent gets before `AgentPart.workers` of the attempt. A driver that takes over has
        been told before what the nodes tell.
        """
        del now

    def saving(self, now: RunTime) -> None:
        """Learn that the workers are asked to save. What a node is shown now, its agent gets before they are asked.

        Called again if other nodes may leave after that than was known.
        """
        del now

    def lost(self, node: NodeId, *, is_dead: bool) -> None:
        """Learn that a node is lost or released.

        `is_dead`: its agent is killed, and what it held may be asked for; else it is only silent, or frees its memory.
        """
        del node, is_dead

    def started(self, word: WorkersStarted) -> None:
        """Learn that a node has started its workers, or had when this driver took over."""
        del word

    def heartbeat(self, changed: Iterable[RankProgress], now: RunTime) -> None:
        """Learn that a node has sent a heartbeat. `changed`: see `WorldProgress.update`."""
        del changed, now

    def told(self, node: NodeId, section: bytes) -> None:
        """Take a node's section of the status, which has changed."""
        del node, section

    def stacks(self, answer: StacksDumped) -> None:
        """Take the stacks of a node's workers, whoever has asked for them."""
        del answer

    def ended(self) -> None:
        """Do what must be done before the agents end: the run is over. This may wait.

        A signal interrupts it by InterruptedByUserError.
        """
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPort:
    """What a capability may use in an agent."""

    spec: AgentSpec
    address: str
    """The node's own."""
    host: HostId
    memory: StateMemory
    call: Callable[[Callable[[], None]], None]
    """Have the agent's event loop call this. Any thread may call it. Raises RuntimeError if the loop has ended."""
    warn: Callable[[str], None]
    """Tell the person what should be known of the node, once."""
    tell: Callable[[bytes], None]
    """Tell the driver the capability's section of the status, in place of the last one. It is sent at once."""
    put_output: Callable[[LogOutput], None]
    """Send output of a worker to the driver."""
    is_full: Callable[[], bool]
    """Whether output must wait, since the driver has not caught up."""


class AgentPart(Protocol):
    """A capability in an agent. All is called in the agent's event loop, and returns at once.

    A part inherits from this class, and has the methods that it needs.
    """

    def shown(self, section: bytes) -> None:
        """Take the node's section of the goal, which is new."""
        del section

    def workers(self, assignment: Assignment, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Return what the workers of an attempt, which begins, are started from: these specifications, or changed."""
        del assignment
        return specs

    def workers_changed(self) -> None:
        """Do what must be done before the driver is told that workers have started, failed or ended."""
        return

    def asked(self) -> bytes:
        """Return the answer to `DriverPort.ask`."""
        return b""

    def close(self) -> None:
        """Stop: the run is over here."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One capability of a run."""

    name: str
    """Of its sections."""
    driver: Callable[[DriverPort], DriverPart]
    agent: Callable[[AgentPort], AgentPart] | None = None
    """Is pickled to be sent to the agents: a class, or a `functools.partial` of one. None: there is no part there."""
