"""The decisions of a run: events in, actions out."""

from __future__ import annotations

from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.job.job import Job
from raylaunch.core.machine.deadlines import handle_time
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    ForwardRequested,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    PeersUnreachable,
    Progressed,
    RequestEvent,
    ResizeRequested,
    RestartRequested,
    StopRequested,
    Tick,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStopped,
)
from raylaunch.core.machine.membership import Membership
from raylaunch.core.machine.nodes import node_draining, node_joined, node_lost
from raylaunch.core.machine.peers import peers_unreachable
from raylaunch.core.machine.requests import handle_request, refusal
from raylaunch.core.machine.resuming import driver_replaced
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.machine.state import Done, Gathering, Phase, Running, Saving, State, Stopping, World
from raylaunch.core.machine.workers import progressed, workers_changed
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Member


class Machine:
    """The state machine of one run. It is pure: no clock, no I/O, and the same events give the same actions."""

    def __init__(self, job: Job, run: Run | None = None) -> None:
        """`run`: the state with which to go on, from another driver's ledger."""
        #: The state, which only the functions of this package change.
        self.run = run or Run(job)

    def start(self) -> list[Action]:
        """Return the first actions, before any event: the run begins to wait for nodes."""
        return self.run.set_timer("the cluster must give the nodes by then")

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions that follow from it, in order.

        Events must come in the order in which they happened. An event of another attempt, or of a node that is not a
        member, changes nothing.
        """
        run = self.run
        run.now = max(run.now, event.at)
        if isinstance(run.state, Done) or isinstance(event, NodeGranted) or self._is_stale(event):
            return []
        match event:
            case DriverReplaced():
                return driver_replaced(run, event)
            case NodeJoined():
                return node_joined(run, event)
            case NodeLost():
                return node_lost(run, event)
            case NodeDraining():
                return node_draining(run, event)
            case PeersUnreachable():
                return peers_unreachable(run, event)
            case StopRequested() | ForwardRequested() | RestartRequested() | ResizeRequested():
                return handle_request(run, event)
            case Tick() | DeadlineSet():
                return handle_time(run, event)
            case Progressed():
                return progressed(run, event)
            case _:
                return workers_changed(run, event)

    def refusal(self, event: RequestEvent | NodeDraining) -> str:
        """Return why this request is not possible now, for a person; "" if it is."""
        return refusal(self.run, event)

    def needs_progress(self, event: Event) -> bool:
        """Whether a last `Progressed` should be handled before this event, since the event may end the world.

        It is True for each event by which a world ends that may have made steps since the latest `Progressed`. It is
        rarely True for others, because a caller looks through all workers for a `Progressed`.
        """
        match self.run.state, event:
            case Stopping() as stopping, WorkersStopped():  # it may have made steps as long as its grace lasted
                return stopping.awaited <= {event.node}
            case Saving() as saving, WorkersExited(failures=()) | WorkersCheckpointed(step=int()):
                return saving.awaited <= {event.node}
            case Running(), WorkersExited(failures=()):
                return self.run.world.unfinished <= {event.node}
            case Saving(), WorkersCheckpointed():
                return True
            case Running() | Saving(), _:
                requests = StopRequested | RestartRequested
                ends = NodeLost | NodeDraining | PeersUnreachable | WorkersExited | WorkersHung | requests | Tick
                return isinstance(event, ends | DriverReplaced)
            case _:
                return False

    def _is_stale(self, event: Event) -> bool:
        """Whether the event is of another attempt or of a node that was given up. Nothing else checks this."""
        match event:
            case WorkersHung() | Progressed():
                return event.attempt != self.run.world.attempt
            case NodeLost() | NodeDraining():
                return event.node not in self.run.nodes
            case _ if isinstance(event, WorkerEvent):
                past = isinstance(self.run.state, Gathering) or event.attempt != self.run.world.attempt
                return past or event.node not in self.run.nodes or event.node not in self.run.world.nodes
            case _:
                return False

    # What others may know of the run

    @property
    def job(self) -> Job:
        """The job, with the bounds of nodes that hold now."""
        return self.run.job

    @property
    def now(self) -> float:
        """The time of the latest event."""
        return self.run.now

    @property
    def state(self) -> State:
        """The present phase and its data."""
        return self.run.state

    @property
    def phase(self) -> Phase:
        """The phase that the machine is in."""
        return self.run.phase

    @property
    def status(self) -> str:
        """What the run is doing and why, for a person."""
        return self.run.state.status

    @property
    def world(self) -> World:
        """The present attempt, or the last one while there is none."""
        return self.run.world

    @property
    def attempt(self) -> int:
        """The number of the present or last attempt; 0 before the first."""
        return self.run.world.attempt

    @property
    def roster(self) -> tuple[NodeId, ...]:
        """The nodes of the present or last attempt, in rank order."""
        return self.run.world.roster

    @property
    def members(self) -> Membership:
        """The nodes that joined and were neither lost nor released."""
        return self.run.members

    @property
    def nodes(self) -> dict[NodeId, Member]:
        """The same by name."""
        return self.run.members.nodes

    @property
    def leaving(self) -> frozenset[NodeId]:
        """The nodes that are drained and, while all save for the next world, the nodes that it does not have."""
        return self.run.leaving

    @property
    def restarts(self) -> int:
        """The number of restarts spent on failures of workers."""
        return self.run.budget.spent
