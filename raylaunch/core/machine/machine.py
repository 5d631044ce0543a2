"""The decisions of a run: events in, actions out. Time is an event too: what follows from it is decided here."""

from __future__ import annotations

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    DriverReplaced,
    Event,
    Finish,
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
    Uncordon,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStopped,
)
from raylaunch.core.machine.nodes import could_improve, node_draining, node_joined, node_lost, release_unresponsive
from raylaunch.core.machine.peers import peers_unreachable
from raylaunch.core.machine.requests import handle_request, refusal
from raylaunch.core.machine.resuming import driver_replaced
from raylaunch.core.machine.run_state import Membership, Run
from raylaunch.core.machine.save_time import Deadline, DeadlineSet
from raylaunch.core.machine.saving import end_run, limit_saving, save_world, stop_unsaved
from raylaunch.core.machine.state import Done, Gathering, Phase, Running, Saving, Starting, State, Stopping, World
from raylaunch.core.machine.transitions import gather, go_on_if_all_stopped, launch_world, restart_world
from raylaunch.core.machine.workers import progressed, workers_changed
from raylaunch.core.newtypes import NodeId, assert_never
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import host_list
from raylaunch.errors import ExitCode


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
            case Tick() | DeadlineSet():
                return _handle_time(run, event)
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


def _handle_time(run: Run, event: Tick | DeadlineSet) -> list[Action]:
    """Do what is due now, or learn by when the run must be over: of two deadlines, the earlier one holds."""
    return _deadline_set(run, event) if isinstance(event, DeadlineSet) else _tick(run)


def _tick(run: Run) -> list[Action]:
    run.timing.timer_at = None
    uncordoned = [
        Uncordon(host=host, why=f"{address} may be used again: its time is over")
        for host, address in run.health.end_exclusions(run.now).items()
        if host not in run.health.drained
    ]
    return [*uncordoned, *_do_what_is_due(run)]


def _deadline_set(run: Run, event: DeadlineSet) -> list[Action]:
    if run.timing.deadline is None or event.deadline < run.timing.deadline.at:
        run.timing.deadline = Deadline(at=event.deadline, since=run.now, why=event.why)
    if isinstance(run.state, Saving):
        return limit_saving(run, run.state)
    return run.set_timer("the run must be over in time")


def _do_what_is_due(run: Run) -> list[Action]:
    if run.timing.deadline is not None and run.is_due(run.end_at):
        why = run.timing.deadline.why
        ending = Finish(exit_code=ExitCode.RESUMABLE, why=f"stopped in time, since {why}")
        return end_run(run, f"the time of the run is short: {why}", ending)
    match run.state:
        case Running(resize=resize) if run.is_due(resize.evacuate_at):
            return save_world(run, "the time of a drained node is short")
        case Running(resize=resize) if run.is_due(resize.last_call):
            resize.last_call = None
            if could_improve(run, resize):
                return save_world(run, "nodes joined")
        case Gathering() as gathering if run.is_due(gathering.deadline):
            return _gathered_too_long(run, gathering)
        case Gathering() as gathering:
            return gather(run, gathering, gathering.why)
        case Starting() | Saving() | Stopping() as state if run.is_due(state.deadline):
            return _deadline_passed(run, state)
    return run.set_timer("the time has not come")


def _deadline_passed(run: Run, state: Starting | Saving | Stopping) -> list[Action]:
    match state:
        case Starting():
            releases, why = release_unresponsive(run, state, "did not start its workers in time")
            return [*releases, *restart_world(run, why)]
        case Saving():
            return stop_unsaved(run, state, f"{host_list(sorted(state.awaited))} did not save in time")
        case Stopping():
            releases, _ = release_unresponsive(run, state, "did not stop its workers in time")
            return [*releases, *go_on_if_all_stopped(run, state)]
        case _:
            return assert_never(state)


def _gathered_too_long(run: Run, state: Gathering) -> list[Action]:
    have, want = len(run.members), run.job.min_nodes
    if run.members.enough:  # the deadline came before the last call
        return launch_world(run, f"{state.status}; no more time to wait")
    waited = run.job.placement_timeout if run.world.attempt == 0 else run.job.join_timeout
    which = "" if have < want else f", and no world size that is a multiple of {run.job.multiple_of},"
    return run.finish(ExitCode.UNAVAILABLE, f"{have} of {want} nodes{which} after {waited:g} s")
