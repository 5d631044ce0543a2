"""The decisions of a run: events in, actions out."""

from __future__ import annotations

from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.failures.failure import Failure, root_cause
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Finish,
    ForwardRequested,
    NodeDraining,
    NodeEvent,
    NodeGranted,
    NodeJoined,
    NodeLost,
    PeersUnreachable,
    Progressed,
    ResizeRequested,
    RestartRequested,
    StopRequested,
    Tick,
    Uncordon,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersElastic,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.requests import Requests
from raylaunch.core.machine.restart_policy import came_from_outside
from raylaunch.core.machine.restoring import take_held
from raylaunch.core.machine.state import Done, Gathering, Running, Saving, Starting, Stopping
from raylaunch.core.newtypes import NO_HOST, assert_never
from raylaunch.errors import ExitCode

MAX_HANG_GRACE = 5.0
"""Seconds of grace at most for the workers of a world that hangs, before the run ends."""


class Machine(Requests):
    """The state machine of one run. It is pure: no clock, no I/O, and the same events give the same actions."""

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions that follow from it, in order.

        Events must come in the order in which they happened. An event of another attempt, or of a node that is not a
        member, changes nothing.
        """
        self.now = max(self.now, event.at)
        if isinstance(self.state, Done) or self._is_stale(event):
            return []
        match event:
            case NodeGranted() | NodeJoined() | NodeLost() | NodeDraining() | PeersUnreachable():
                return self._nodes_changed(event)
            case StopRequested() | ForwardRequested() | RestartRequested() | ResizeRequested():
                return self._requested(event)
            case Tick():
                return self._tick()
            case DriverReplaced():
                return []
            case Progressed():
                return self._progressed(event)
            case _:
                return self._workers_changed(event)

    def needs_progress(self, event: Event) -> bool:
        """Whether a last `Progressed` should be handled before this event, since the event may end the world.

        It is True for each event by which a world ends that may have made steps since the latest `Progressed`. It is
        rarely True for others, because a caller looks through all workers for a `Progressed`.
        """
        match self.state, event:
            case Stopping() as stopping, WorkersStopped():  # it may have made steps as long as its grace lasted
                return stopping.awaited <= {event.node}
            case Saving() as saving, WorkersExited(failures=()) | WorkersCheckpointed(step=int()):
                return saving.awaited <= {event.node}
            case Running(), WorkersExited(failures=()):
                return self.world.unfinished <= {event.node}
            case Saving(), WorkersCheckpointed():
                return True
            case Running() | Saving(), _:
                requests = StopRequested | RestartRequested
                ends = NodeLost | NodeDraining | PeersUnreachable | WorkersExited | WorkersHung | requests | Tick
                return isinstance(event, ends)
            case _:
                return False

    def _is_stale(self, event: Event) -> bool:
        """Whether the event is of another attempt or of a node that was given up. Nothing else checks this."""
        match event:
            case WorkersHung() | Progressed():
                return event.attempt != self.world.attempt
            case NodeLost() | NodeDraining():
                return event.node not in self.nodes
            case _ if isinstance(event, WorkerEvent):
                past = isinstance(self.state, Gathering) or event.attempt != self.world.attempt
                return past or event.node not in self.nodes or event.node not in self.world.nodes
            case _:
                return False

    # Nodes

    def _nodes_changed(self, event: NodeEvent) -> list[Action]:
        match event:
            case NodeGranted():
                return []
            case NodeJoined():
                return self._node_joined(event)
            case NodeLost():
                if event.held:
                    self.world.known.orphaned[event.node] = event.held
                return self._node_lost(event.node, event.why)
            case NodeDraining():
                return self._node_draining(event)
            case PeersUnreachable():
                return self._peers_unreachable(event)
            case _:
                return assert_never(event)

    # Workers

    def _workers_changed(self, event: WorkerEvent | WorkersHung) -> list[Action]:
        match event:
            case WorkersStarted():
                return self._workers_started(event)
            case WorkersElastic():
                self.world.elastic.add(event.node)
                return []
            case WorkersExited():
                return self._workers_exited(event)
            case WorkersStopped():
                return self._workers_stopped(event)
            case WorkersCheckpointed():
                return self._workers_checkpointed(event)
            case WorkersHung():
                return self._workers_hung(event)
            case _:
                return assert_never(event)

    def _workers_started(self, event: WorkersStarted) -> list[Action]:
        if not isinstance(self.state, Starting):
            return []
        self.state.awaited.discard(event.node)
        take_held(self.world, event)
        self.world.stayed += event.stayed
        if not event.stayed:
            self.world.elastic.discard(event.node)
        return self._run_if_all_started(self.state)

    def _workers_exited(self, event: WorkersExited) -> list[Action]:
        self.world.failures.extend(event.failures)
        if isinstance(self.state, Stopping):
            return []
        if event.failures:
            return self._workers_failed(root_cause(event.failures) or event.failures[0])
        self.world.finishing = True
        self.world.unfinished.discard(event.node)
        if not self.world.unfinished:
            size = self.world.size
            return self._finish(ExitCode.OK, "the worker finished" if size == 1 else f"all {size} workers finished")
        match self.state:
            case Starting() as starting:
                starting.awaited.discard(event.node)
                return self._run_if_all_started(starting)
            case Saving() as saving:
                saving.awaited.discard(event.node)
                return self._stop_if_all_saved(saving)
            case _:
                return []

    def _workers_hung(self, event: WorkersHung) -> list[Action]:
        cause = root_cause(event.failures)
        if cause is None or not isinstance(self.state, Running | Saving):
            return []
        self.world.failures.extend(event.failures)
        return self._workers_failed(cause)

    def _workers_failed(self, cause: Failure) -> list[Action]:
        what = f"rank {cause.rank} on {cause.node} {cause.what}"
        if isinstance(self.state, Saving):  # the world was to end in any case
            return self._end_saving(self.state, what)
        if drained := self._drained_node_that_explains(cause):
            return self._restart(f"{what}; {drained} is being drained")
        delay = self.crashes.delay(cause, self.now - self.world.launched_at)
        member = None if cause.is_collateral else self.nodes.get(cause.node)
        host = NO_HOST if member is None else member.host
        bad = self.health.blame(host, self.now, cause.kind)
        needed = bad and not self.members.enough_without(host)
        if refused := self.budget.spend(cause, self.now, self.world.nodes, elsewhere=bad and not needed):
            return self._end_run_for(cause, f"{what}; {refused}")
        cordon, clause = self._cordon_host_of(member, needed=needed) if bad and member is not None else ([], "")
        if delay:
            clause += f"; after {delay:g} s, since it crashes again and again"
        backoff_until = self.now + delay if delay else None
        return [*cordon, *self._restart(f"{what}; {self.budget}{clause}", backoff_until=backoff_until)]

    def _end_run_for(self, cause: Failure, why: str) -> list[Action]:
        # Workers that hang do not react to a signal; those that wait for them may.
        grace = min(self.job.shutdown_timeout, MAX_HANG_GRACE) if cause.hung else self.job.shutdown_timeout
        return self._stop(why, grace=grace, ending=Finish(exit_code=ExitCode.JOB_FAILED, why=why))

    def _drained_node_that_explains(self, cause: Failure) -> str:
        """Return a drained node of the world that took its workers along, if that explains the failure; else ""."""
        suspects = self.world.roster if cause.is_collateral else (cause.node,) if came_from_outside(cause) else ()
        return next((node for node in suspects if node in self.nodes and self.nodes[node].draining), "")

    def _workers_stopped(self, event: WorkersStopped) -> list[Action]:
        self.world.failures.extend(event.failures)
        if not isinstance(self.state, Stopping):
            return []
        self.state.awaited.discard(event.node)
        return self._go_on_if_all_stopped(self.state)

    def _workers_checkpointed(self, event: WorkersCheckpointed) -> list[Action]:
        if not isinstance(self.state, Saving) or event.node not in self.world.unfinished:
            return []  # a node whose workers have finished answers that none of them can save
        if event.step is None:  # only a signal reaches such a script
            if self._is_left_to_finish(self.state):
                return []
            return self._stop_unsaved(self.state, f"workers of {event.node} do not call `should_checkpoint`")
        self.state.awaited.discard(event.node)
        return self._stop_if_all_saved(self.state)

    def _is_left_to_finish(self, state: Saving) -> bool:
        """Whether workers get no signal before the deadline, since those of a node have finished.

        A drained node and the end of the run do not wait for that.
        """
        return self.world.finishing and state.ending is None and self.world.drain_deadline is None

    # Time

    def _tick(self) -> list[Action]:
        self._timer_at = None
        over = {host: self.excluded.pop(host) for host in self.health.end_exclusions(self.now)}
        uncordoned = [
            Uncordon(host=host, why=f"{address} may be used again: its time is over")
            for host, address in over.items()
            if host not in self.drained_hosts
        ]
        return [*uncordoned, *self._do_what_is_due()]

    def _do_what_is_due(self) -> list[Action]:
        match self.state:
            case Running(resize=resize) if self._is_due(resize.evacuate_at):
                return self._resize("the time of a drained node is short")
            case Running(resize=resize) if self._is_due(resize.last_call):
                resize.last_call = None
                if self._could_improve(resize):
                    return self._resize("nodes joined")
            case Gathering() as gathering if self._is_due(gathering.deadline):
                return self._gathered_too_long(gathering)
            case Gathering() as gathering:
                return self._gather(gathering, gathering.why)
            case Starting() | Saving() | Stopping() as state if self._is_due(state.deadline):
                return self._deadline_passed(state)
        return self._set_timer("the time has not come")

    def _deadline_passed(self, state: Starting | Saving | Stopping) -> list[Action]:
        match state:
            case Starting():
                releases, why = self._release_unresponsive(state, "did not start its workers in time")
                return [*releases, *self._restart(why)]
            case Saving():
                return self._stop_unsaved(state, f"{', '.join(sorted(state.awaited))} did not save in time")
            case Stopping():
                releases, _ = self._release_unresponsive(state, "did not stop its workers in time")
                return [*releases, *self._go_on_if_all_stopped(state)]
            case _:
                return assert_never(state)

    def _gathered_too_long(self, state: Gathering) -> list[Action]:
        have, want = len(self.members), self.job.min_nodes
        if self.members.enough:  # the deadline came before the last call
            return self._launch(f"{state.status}; no more time to wait")
        waited = self.job.placement_timeout if self.world.attempt == 0 else self.job.join_timeout
        which = "" if have < want else f", and no world size that is a multiple of {self.job.multiple_of},"
        return self._finish(ExitCode.UNAVAILABLE, f"{have} of {want} nodes{which} after {waited:g} s")
