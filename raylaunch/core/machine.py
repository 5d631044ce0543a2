"""The decisions: facts in, orders out. `handle` is the only way in, and nothing here knows how orders are obeyed."""

from __future__ import annotations

import signal as signals
from typing import assert_never

from raylaunch.core.actions import Action, Finish, Forward, Readmit, Release, Stop
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeDraining,
    NodeEvent,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    StopAsked,
    Tick,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure, root_cause
from raylaunch.core.health import came_from_outside
from raylaunch.core.phases import STOP_MARGIN, Phase, Phases
from raylaunch.core.ranks import Member
from raylaunch.core.words import count
from raylaunch.errors import ExitCode, stopped_by

HUNG_GRACE = 5.0
"""Seconds for workers of a world that hangs, before the run ends."""


class Machine(Phases):
    """One run. Attempts count 1, 2, 3; a word from another attempt than the present one changes nothing."""

    def handle(self, event: Event) -> list[Action]:
        """Take one fact, answer with the orders that follow from it."""
        self.now = max(self.now, event.at)
        if self.phase is Phase.DONE or self._is_stale(event):
            return []
        match event:
            case NodeGranted() | NodeJoined() | NodeLost() | NodeDraining():
                return self._nodes_changed(event)
            case StopAsked():
                return self._stop_asked(event)
            case ForwardAsked():
                return self._forward_asked(event)
            case Tick():
                return self._tick()
            case Progressed():
                self.crashes.progressed()
                return []
            case _:
                return self._workers_changed(event)

    def _is_stale(self, event: Event) -> bool:
        """The one place where words from a past attempt, or of a node we gave up, are dropped."""
        match event:
            case WorkersHung() | Progressed():
                return event.attempt != self.attempt
            case NodeLost() | NodeDraining():
                return event.node not in self.nodes
            case _ if isinstance(event, WorkerEvent):
                past = self.phase is Phase.GATHERING or event.attempt != self.attempt
                return past or event.node not in self.nodes or event.node not in self._roster
            case _:
                return False

    # Nodes come and go.

    def _nodes_changed(self, event: NodeEvent) -> list[Action]:
        match event:
            case NodeGranted():
                return []
            case NodeJoined():
                return self._node_joined(event)
            case NodeLost():
                return self._node_lost(event.node, event.why)
            case NodeDraining():
                return self._node_draining(event)
            case _:
                assert_never(event)

    def _node_joined(self, event: NodeJoined) -> list[Action]:
        if event.host in self.health.excluded:
            return [Release(node=event.node, why="its host is left out at present")]
        self.members.add(Member(node=event.node, address=event.address, nproc=event.nproc, host=event.host))
        if self.phase is Phase.GATHERING:
            return self._gather(f"{event.node} joined")
        if self.phase is Phase.STOPPING:
            return []
        all_there = len(self.members) >= self.job.max_nodes or self.evacuation is not None
        if (self.last_call is None or all_there) and not self._could_change():
            return []
        if self.phase is Phase.RUNNING and all_there:
            return self._resize(f"{event.node} joined")
        if self.last_call is None or all_there:
            self.last_call = self.now + (0.0 if all_there else self.job.last_call)
        return self._wake(f"{event.node} joined; more may come")

    def _node_lost(self, node: str, why: str) -> list[Action]:
        had_a_part = len(self.unfinished)
        member = self._give_up(node)
        pardoned = self.budget.pardon(member, self.now)
        left_out, why_out = self._blame_for_going(member)
        took_part = len(self.unfinished) < had_a_part
        return [*left_out, *self._go_on(f"{node} was lost: {why}{why_out}", took_part=took_part, pardoned=pardoned)]

    def _go_on(self, what: str, *, took_part: bool, pardoned: bool) -> list[Action]:
        """Without nodes that were lost. `pardoned`: that explains failures before it."""
        if self.phase is Phase.GATHERING:
            return self._gather(what)
        if pardoned and self._ends_for_a_failure():
            self.status, self.ending = what, None
        if self.phase is Phase.STOPPING and not self.asking:
            return self._stopped_so_far()
        if not took_part:
            return self._wake("more nodes may come")
        return self._stop(what, grace=0.0) if self.asking else self._begin_again(what)

    def _ends_for_a_failure(self) -> bool:
        return self.ending is not None and self.ending.exit_code == ExitCode.JOB_FAILED

    def _node_draining(self, event: NodeDraining) -> list[Action]:
        self.members.drain(event.node)
        why = f"{event.node} is being drained: {event.why}"
        if self.phase is Phase.GATHERING:
            return [*self._let_go(), *self._gather(why)]
        let_go = self._let_go(kept=self._roster)
        return [*let_go, *self._world_drained(event, why)] if event.node in self.unfinished else let_go

    def _world_drained(self, event: NodeDraining, why: str) -> list[Action]:
        """One of its nodes goes."""
        latest = min(event.deadline, self.drained_at if self.drained_at is not None else event.deadline)
        self.drained_at = latest
        if self.phase is Phase.STOPPING:
            return self._less_time_to_save() if self.asking else []
        if self.members.enough:
            return self._leave_behind(why)
        self.status = f"{why}; the workers go on until another node comes, or the time is short"
        self.evacuation = latest - 2 * self.job.shutdown_timeout - STOP_MARGIN
        self.health.hurry(self.now)
        return self._wake(self.status)

    def _leave_behind(self, why: str) -> list[Action]:
        if self.phase is Phase.RUNNING:
            return self._resize(why)
        return self._stop(why, grace=min(self.job.shutdown_timeout, self._time_left()))

    def _less_time_to_save(self) -> list[Action]:
        latest = self.now + self._time_to_save()
        self.deadline = latest if self.deadline is None else min(self.deadline, latest)
        return self._wake("all workers must have saved by then")

    # Workers start, end and are stopped.

    def _workers_changed(self, event: WorkerEvent | WorkersHung) -> list[Action]:
        match event:
            case WorkersStarted():
                return self._workers_started(event)
            case WorkersExited():
                return self._workers_exited(event)
            case WorkersStopped():
                return self._workers_stopped(event)
            case WorkersCheckpointed():
                return self._workers_checkpointed(event)
            case WorkersHung():
                return self._workers_hung(event)
            case _:
                assert_never(event)

    def _workers_started(self, event: WorkersStarted) -> list[Action]:
        if self.phase is not Phase.STARTING:
            return []
        self.awaited.discard(event.node)
        return self._started_so_far()

    def _started_so_far(self) -> list[Action]:
        if self.awaited:
            return []
        self.phase = Phase.RUNNING
        self.deadline = None
        self.status = f"{count(self.workers, 'worker')} on {count(len(self.roster), 'node')}"
        held, self.held = self.held, []
        return [*map(self._forward, held), *self._wake("more nodes may come")]

    def _workers_exited(self, event: WorkersExited) -> list[Action]:
        self.failures.extend(event.failures)
        if self.phase is Phase.STOPPING and not self.asking:
            return []
        if event.failures:
            cause = root_cause(event.failures) or event.failures[0]
            return self._workers_failed(cause)
        self.finishing = True
        self.unfinished.discard(event.node)
        self.awaited.discard(event.node)
        if not self.unfinished:
            return self._all_finished()
        if self.phase is Phase.STARTING:
            return self._started_so_far()
        return self._asked_so_far() if self.asking else []

    def _all_finished(self) -> list[Action]:
        how = "the worker finished" if self.workers == 1 else f"all {self.workers} workers finished"
        return self._finish(ExitCode.OK, how)

    def _workers_hung(self, event: WorkersHung) -> list[Action]:
        cause = root_cause(event.failures)
        if cause is None or (self.phase is not Phase.RUNNING and not self.asking):
            return []
        self.failures.extend(event.failures)
        return self._workers_failed(cause)

    def _workers_failed(self, cause: Failure) -> list[Action]:
        what = f"rank {cause.rank} on {cause.node} {cause.what}"
        if self.asking:  # the world was to be another in any case
            return self._stop(what, grace=0.0)
        if drained := self._drained_with(cause):
            return self._begin_again(f"{what}; {drained} is being drained")
        delay = self.crashes.delay(cause, self.now - self.launched_at)
        host = "" if cause.is_collateral or cause.node not in self.nodes else self.nodes[cause.node].host
        bad = self.health.blame(host, self.now, cause.kind)
        needed = bad and not self.members.enough_without(host)
        if refused := self.budget.spend(cause, self.now, self._roster, elsewhere=bad and not needed):
            end = f"{what}; {refused}"
            ending = Finish(exit_code=ExitCode.JOB_FAILED, why=end)
            # Who hangs does not hear a signal either; what waits for it may.
            grace = min(self.job.shutdown_timeout, HUNG_GRACE) if cause.hung else self.job.shutdown_timeout
            return self._stop(end, grace=grace, ending=ending)
        left_out, why = self._leave_out(cause.node, host, needed=needed) if bad else ([], "")
        if delay:
            self.not_before = self.now + delay
            why += f"; after {delay:g} s, since it crashes again and again"
        return [*left_out, *self._begin_again(f"{what}; {self.budget}{why}")]

    def _drained_with(self, cause: Failure) -> str:
        """A node of the world that goes and takes its workers along, where that explains a failure."""
        suspects = self.roster if cause.is_collateral else (cause.node,) if came_from_outside(cause) else ()
        return next((node for node in suspects if node in self.nodes and self.nodes[node].draining), "")

    def _workers_stopped(self, event: WorkersStopped) -> list[Action]:
        self.failures.extend(event.failures)
        if self.phase is not Phase.STOPPING or self.asking:
            return []
        self.awaited.discard(event.node)
        return self._stopped_so_far()

    def _workers_checkpointed(self, event: WorkersCheckpointed) -> list[Action]:
        if not self.asking:
            return []
        if event.step is None:
            return self._signal_workers()  # they know nothing of checkpoints that are asked for
        self.awaited.discard(event.node)
        return self._asked_so_far()

    # People and time.

    def _stop_asked(self, event: StopAsked) -> list[Action]:
        code = stopped_by(signals.Signals[event.signal])
        ending = Finish(exit_code=code, why=f"stopped by {event.signal}")
        if self.phase is Phase.GATHERING:
            return self._finish(ending.exit_code, ending.why)
        if self.phase is not Phase.STOPPING or self.asking:
            why = f"{event.signal} received"
            return self._stop(why, grace=self.job.shutdown_timeout, ending=ending, signal=event.signal)
        if self.ending is None:
            self.ending = ending
            return []
        at_once = Stop(attempt=self.attempt, nodes=self._alive(self.roster), grace=0.0, why=f"{event.signal} again")
        return [at_once, *self._finish(self.ending.exit_code, self.ending.why)]

    def _forward_asked(self, event: ForwardAsked) -> list[Action]:
        if self.phase is Phase.RUNNING:
            return [self._forward(event.signal)]
        if self.phase is Phase.STARTING and event.signal not in self.held:
            self.held.append(event.signal)  # some workers may be there already, and whoever sends it may have seen them
        return []

    def _forward(self, signal: str) -> Action:
        nodes = tuple(node for node in self.roster if node in self.unfinished)
        return Forward(attempt=self.attempt, nodes=nodes, signal=signal, why=f"{signal} received")

    def _tick(self) -> list[Action]:
        self._woken = None
        back = [Readmit(host=host, why="its time is over") for host in self.health.cooled(self.now)]
        if self._is_due(self.deadline):
            return [*back, *self._deadline_passed()]
        if self.phase is Phase.GATHERING:
            return [*back, *self._gather(self.why)]
        if self.phase is Phase.RUNNING and self._is_due(self.evacuation):
            return [*back, *self._resize("the time of a drained node is short")]
        if self.phase is Phase.RUNNING and self._is_due(self.last_call):
            self.last_call = None
            if self._could_change():
                return [*back, *self._resize("nodes joined")]
        return [*back, *self._wake("the time has not come")]

    def _deadline_passed(self) -> list[Action]:
        self.deadline = None
        match self.phase:
            case Phase.GATHERING:
                return self._gathered_too_long()
            case Phase.STOPPING if self.asking:
                return self._signal_workers()
            case Phase.STARTING:
                releases, why = self._give_up_silent("did not start its workers in time")
                return [*releases, *self._begin_again(why)]
            case _:
                releases, _ = self._give_up_silent("did not stop its workers in time")
                return [*releases, *self._stopped_so_far()]

    def _gathered_too_long(self) -> list[Action]:
        have, want = len(self.members), self.job.min_nodes
        if self.members.enough:  # the time was shorter than the last call
            return self._launch(f"{self.status}; no more time to wait")
        waited = self.job.placement_timeout if self.attempt == 0 else self.job.join_timeout
        which = "" if have < want else f", and no world size that is a multiple of {self.job.multiple_of},"
        return self._finish(ExitCode.UNAVAILABLE, f"{have} of {want} nodes{which} after {waited:g} s")

    # What is true of the nodes.

    def _could_change(self) -> bool:
        """Whether there is a better world to be had; one that has begun to finish is not disturbed for it."""
        if self.finishing or self.asking:
            return False
        if self.evacuation is not None:
            return self.members.enough
        if len(self.roster) >= self.job.max_nodes:
            return False
        return sum(member.nproc for member in self.members.choose(self.roster)) > self.workers
