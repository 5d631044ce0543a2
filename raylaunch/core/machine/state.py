"""The world that a run has, and a dataclass for each phase with the data of that phase.

As in the controller states of Ray Train v2, a field that a phase does not need does not exist in that phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from raylaunch.core.failures.failure import Failure
from raylaunch.core.machine.events_and_actions import Finish
from raylaunch.core.machine.save_time import Deadline
from raylaunch.core.newtypes import SIGTERM, NodeId, SignalName, StrEnum
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count


class Phase(StrEnum):
    """The phase of a run. Restarting, resizing and draining are reasons to stop a world, not phases."""

    GATHERING = "gathering"
    """No world: waiting until there are enough nodes for one."""
    STARTING = "starting"
    """The nodes of the world are starting its workers."""
    RUNNING = "running"
    """All workers of the world were started."""
    SAVING = "saving"
    """The workers were asked to write a checkpoint before they are stopped. They have got no signal yet."""
    STOPPING = "stopping"
    """The workers were told to end; then comes another attempt, or the end of the run."""
    DONE = "done"
    """The run is over. Nothing changes any more."""

    @property
    def is_training(self) -> bool:
        """Whether workers make steps."""
        return self in (Phase.RUNNING, Phase.SAVING)


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.STARTING, Phase.DONE}),
    Phase.STARTING: frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.STARTING, Phase.SAVING, Phase.STOPPING, Phase.DONE}),
    Phase.SAVING: frozenset({Phase.STARTING, Phase.STOPPING, Phase.DONE}),
    Phase.STOPPING: frozenset({Phase.STARTING, Phase.GATHERING, Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""The phases that may follow each phase. STARTING follows STARTING when a world breaks before it runs."""


@dataclass(slots=True, kw_only=True)
class World:
    """The workers of one attempt (torchelastic: the worker group) and the nodes that run them.

    It stays until the next attempt is launched, also while the run is stopping or gathering.
    """

    attempt: int = 0
    """1, 2, 3, ...; 0 before the first launch."""
    told_attempt: int = 0
    """The highest number of which an earlier driver has told any node: the next attempt gets a higher one."""
    roster: tuple[NodeId, ...] = ()
    """The nodes in rank order. All and only these run workers of the attempt."""
    members: tuple[Member, ...] = ()
    """The same nodes, as they were when the attempt was launched."""
    size: int = 0
    """The number of workers: WORLD_SIZE."""
    launched_at: float = 0.0
    unfinished: set[NodeId] = field(default_factory=set)
    """Nodes of the roster that are still members and whose workers have not all ended with exit code 0."""
    finishing: bool = False
    """Whether all workers of some node have ended with exit code 0: the script is coming to its end."""
    has_progressed: bool = False
    """Whether its workers have made more than one step."""
    has_saved: bool = False
    """Whether all its workers have saved before a planned change."""
    failures: list[Failure] = field(default_factory=list)
    deadline: Deadline | None = None
    """When the first of its nodes will be taken away; None: none will."""
    held_signals: list[SignalName] = field(default_factory=list)
    """Signals to forward as soon as all workers are started. Those that were not forwarded pass to the next world."""
    elastic: set[NodeId] = field(default_factory=set)
    """Nodes of which workers can stay: they have said so in this attempt, or have stayed when it began."""
    staying: tuple[NodeId, ...] = ()
    """Nodes on which workers of the attempt before were told to stay. They cannot go on without a commit to restore."""
    stayed: int = 0
    """How many workers were not started again, but are processes of the attempt before."""
    replacements: tuple[NodeId, ...] = ()
    """The nodes of the next world, if none of this one is in it. Known once all save: they get copies of its commit."""
    copied: frozenset[NodeId] = frozenset()
    """The nodes that were to leave when all were asked to save: what their workers save is copied to other nodes."""
    nodes: frozenset[NodeId] = field(init=False)
    """The roster as a set."""

    def __post_init__(self) -> None:
        self.nodes = frozenset(self.roster)
        self.unfinished = set(self.roster)

    @property
    def running_nodes(self) -> tuple[NodeId, ...]:
        """The unfinished nodes in rank order."""
        return tuple(node for node in self.roster if node in self.unfinished)

    @property
    def survivors(self) -> str:
        """How many workers were not started, but have stayed, for a person; "": all were started."""
        return f"; {self.stayed} of {count(self.size, 'worker')} stayed" if self.stayed else ""

    def needs(self, node: NodeId) -> bool:
        """Return whether the next world may need what a node holds."""
        return not self.has_saved or (node in self.nodes and node not in self.copied)

    def staying_in(self, chosen: Iterable[Member]) -> tuple[NodeId, ...]:
        """Return the nodes whose workers can stay in a world of these nodes."""
        names = {member.node for member in chosen}
        return tuple(node for node in self.roster if node in names and node in self.elastic)


@dataclass(slots=True)
class ResizeTimes:
    """When a world that is starting or running has to be replaced by one of other nodes. None: not planned."""

    last_call: float | None = None
    """When nodes that joined are taken in: until then more of them may come (torchelastic: last_call_timeout)."""
    evacuate_at: float | None = None
    """When the world must leave its drained nodes, though there are too few nodes for another world yet."""


@dataclass(slots=True, kw_only=True)
class Gathering:
    """GATHERING: waits for nodes until the deadline."""

    phase: ClassVar[Phase] = Phase.GATHERING
    status: str
    deadline: float
    why: str = ""
    """Why the last world ended; empty before the first attempt."""
    last_call: float | None = None
    """When the run starts with fewer than MAX nodes. None: there are fewer than MIN."""
    backoff_until: float | None = None
    """No attempt before this time, because the script crashes in a loop."""

    @property
    def timers(self) -> tuple[float | None, ...]:
        """The times at which the machine needs a `Tick` in this phase."""
        return self.deadline, self.last_call, self.backoff_until


@dataclass(slots=True, kw_only=True)
class AwaitingNodes:
    """A phase that ends when all awaited nodes have answered. Nodes that miss the deadline are given up."""

    status: str
    deadline: float
    awaited: set[NodeId]
    """Nodes of the roster that have not answered yet."""

    @property
    def timers(self) -> tuple[float | None, ...]:
        """The times at which the machine needs a `Tick` in this phase."""
        return (self.deadline,)


@dataclass(slots=True, kw_only=True)
class Starting(AwaitingNodes):
    """STARTING: the nodes in `awaited` have not reported `WorkersStarted`."""

    phase: ClassVar[Phase] = Phase.STARTING
    resize: ResizeTimes = field(default_factory=ResizeTimes)
    """Takes effect when the world runs."""


@dataclass(slots=True, kw_only=True)
class Running:
    """RUNNING: all workers were started. There is no deadline."""

    phase: ClassVar[Phase] = Phase.RUNNING
    status: str
    resize: ResizeTimes

    @property
    def timers(self) -> tuple[float | None, ...]:
        """The times at which the machine needs a `Tick` in this phase."""
        return self.resize.last_call, self.resize.evacuate_at


@dataclass(slots=True, kw_only=True)
class Saving(AwaitingNodes):
    """SAVING: awaits `WorkersCheckpointed`. After the deadline the workers are stopped whether they saved or not."""

    phase: ClassVar[Phase] = Phase.SAVING
    began: float
    ending: Finish | None = None
    """The end of the run that follows. None: another attempt."""
    signalled: bool = False
    """Whether a signal ends the run: the next one does not wait for the workers to save."""
    step: int | None = None
    """The step at which workers have saved; None: none have yet."""


@dataclass(slots=True, kw_only=True)
class Stopping(AwaitingNodes):
    """STOPPING: the nodes in `awaited` have not reported `WorkersStopped`."""

    phase: ClassVar[Phase] = Phase.STOPPING
    ending: Finish | None = None
    """The end of the run that follows. None: another attempt."""
    kill_at: float
    """When the workers' grace is over."""
    backoff_until: float | None = None
    """As in `Gathering`."""
    signal: SignalName = SIGTERM
    """What the workers get first."""


@dataclass(slots=True, kw_only=True)
class Done:
    """DONE: the status says why."""

    phase: ClassVar[Phase] = Phase.DONE
    status: str
    exit_code: int
    timers: ClassVar[tuple[float | None, ...]] = ()


State = Gathering | Starting | Running | Saving | Stopping | Done
