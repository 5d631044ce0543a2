"""The transitions between the phases of a run, each with the actions that belong to it."""

from __future__ import annotations

import math
from collections.abc import Collection

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    Finish,
    ForwardSignal,
    Launch,
    Release,
    ReportUnsaved,
    RequestCheckpoint,
    SetTimer,
    Stop,
)
from raylaunch.core.machine.restart_policy import NEEDED_EXCLUSION, CrashLoopBackoff, HostHealth, RestartBudget
from raylaunch.core.machine.restoring import restore_commit
from raylaunch.core.machine.state import (
    TRANSITIONS,
    Done,
    Gathering,
    Membership,
    Phase,
    Running,
    Saving,
    Starting,
    State,
    Stopping,
    World,
)
from raylaunch.core.newtypes import SIGTERM, HostId, NodeId, SignalName
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count

MAX_SAVING_SECONDS = 600.0
"""The longest SAVING phase: all workers have to come to one step and save, and steps and checkpoints may be large."""
STOP_MARGIN = 10.0
"""Seconds that a node has, beyond the grace, to report that its workers are gone."""


class PhaseTransitions:
    """The state of one run and its transitions. `Machine` decides which transition an event leads to.

    Each transition changes the state and returns the actions that go with the change.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.now = 0.0
        #: The present phase and its data.
        self.state: State = Gathering(status="waiting for nodes", deadline=job.placement_timeout)
        #: The present attempt, or the last one while there is none.
        self.world = World()
        self.members = Membership(job)
        self.budget = RestartBudget(job.max_restarts)
        self.health = HostHealth(job.exclude_after, needed_exclusion=min(NEEDED_EXCLUSION, job.join_timeout / 2))
        self.crashes = CrashLoopBackoff()
        self.is_of_one_node = job.max_nodes == 1
        self.is_of_fixed_size = job.nprocs is not None
        #: Whether a person has requested other bounds than those of the job.
        self.is_resized = False
        #: The least number of nodes that was requested. `job.min_nodes` is less until as many nodes have been there.
        self.wanted_nodes = job.min_nodes
        #: The addresses of the hosts that are excluded now.
        self.excluded: dict[HostId, str] = {}
        #: Hosts that a person drained.
        self.drained_hosts: set[HostId] = set()
        #: Whether any attempt has made a step.
        self.has_progressed = False
        #: When nodes were found that cannot reach each other and are all needed. None: not since the latest step.
        self.unreachable_since: float | None = None
        #: The time of the latest `SetTimer` that has not fired.
        self._timer_at: float | None = None

    @property
    def phase(self) -> Phase:
        """The phase that the machine is in."""
        return self.state.phase

    @property
    def status(self) -> str:
        """What the run is doing and why, for a person."""
        return self.state.status

    @property
    def attempt(self) -> int:
        """The number of the present or last attempt; 0 before the first."""
        return self.world.attempt

    @property
    def roster(self) -> tuple[NodeId, ...]:
        """The nodes of the present or last attempt, in rank order."""
        return self.world.roster

    @property
    def nodes(self) -> dict[NodeId, Member]:
        """All nodes that joined and were neither lost nor released, by name."""
        return self.members.nodes

    @property
    def leaving(self) -> frozenset[NodeId]:
        """The nodes that are drained and, while all save for the next world, those that it does not have."""
        drained = frozenset(node for node, member in self.nodes.items() if member.draining)
        if not isinstance(self.state, Saving) or self.state.ending is not None or not self.members.enough:
            return drained
        return drained | self.world.nodes - {member.node for member in self._chosen_next()}

    @property
    def restarts(self) -> int:
        """The number of restarts spent on failures of workers."""
        return self.budget.spent

    def start(self) -> list[Action]:
        """Return the first actions, before any event: the run begins to wait for nodes."""
        return self._set_timer("the cluster must give the nodes by then")

    def _enter(self, state: State) -> None:
        assert state.phase in TRANSITIONS[self.phase], f"{state.phase} cannot follow {self.phase}"
        self.state = state

    # GATHERING -> STARTING

    def _gather(self, state: Gathering, why: str) -> list[Action]:
        """Launch if there are enough nodes, else update the status, which says what is missing."""
        have, low, high = len(self.members), self.job.min_nodes, self.job.max_nodes
        enough = self.members.enough
        state.status = f"{have} of {low} nodes" if low == high else f"{count(have, 'node')} ({low} to {high} requested)"
        if have >= low and not enough:
            state.status += f", but no world size that is a multiple of {self.job.multiple_of}"
        if state.backoff_until is not None and self.now < state.backoff_until:
            return self._set_timer(state.status)
        state.backoff_until = None
        if enough and (have >= high or self._is_due(state.last_call)):
            return self._launch(f"{state.status}; {why if have >= high else 'last call is over'}")
        if not enough:
            state.last_call = None
            self.health.shorten_exclusions(self.now)
        elif state.last_call is None:
            state.last_call = self.now + self.job.last_call
        return self._set_timer(state.status)

    def _launch(self, why: str, *, at_once: bool = False) -> list[Action]:
        """`at_once`: workers of the last world may be alive, and may stay."""
        chosen = self._chosen_next()
        staying = self.world.staying_in(chosen) if at_once else ()
        self.world = World(
            attempt=self.world.attempt + 1,
            roster=tuple(member.node for member in chosen),
            members=chosen,
            size=sum(member.nproc for member in chosen),
            launched_at=self.now,
            held_signals=self.world.held_signals,
            known=self.world.known,
            elastic=set(staying),
            staying=staying,
        )
        status = f"starting {self._workers_and_nodes}"
        self._enter(Starting(status=status, deadline=self.now + self.job.start_timeout, awaited=set(self.world.roster)))
        launch = Launch(attempt=self.world.attempt, roster=self.world.roster, why=why, staying=staying)
        releases = [*self._release_drained(), *self._release_surplus()]
        return [launch, *releases, *self._set_timer("all workers must be started by then")]

    def _chosen_next(self) -> tuple[Member, ...]:
        """The nodes of the next world, if it began now. Those that have copies of this one's last commit come first."""
        survivors = (*self.members.successors(self.world.members), *self.world.replacements)
        return self.members.choose(survivors, last=self.health.doubtful)

    @property
    def _workers_and_nodes(self) -> str:
        return f"{count(self.world.size, 'worker')} on {count(len(self.world.roster), 'node')}"

    def _release_drained(self, kept: Collection[NodeId] = ()) -> list[Action]:
        """Release the drained nodes except `kept`. The run needs them no more, and whoever drains them waits."""
        drained = [node for node, member in self.nodes.items() if member.draining and node not in kept]
        for node in drained:
            self.members.remove(node)
        return [Release(node=node, why="it is being drained", frees_memory=True) for node in drained]

    def _release_surplus(self) -> list[Action]:
        """Release nodes without workers beyond MAX and the spare ones: a person has requested fewer nodes."""
        if not self.is_resized:
            return []
        idle = [node for node, member in self.nodes.items() if not member.draining and node not in self.world.nodes]
        taking_part = len(self.members) - len(idle)
        surplus = idle[max(0, self.job.max_nodes + self.job.spares - taking_part) :]
        for node in surplus:
            self.members.remove(node)
        return [Release(node=node, why="fewer nodes were requested", frees_memory=True) for node in surplus]

    # STARTING -> RUNNING

    def _run_if_all_started(self, state: Starting) -> list[Action]:
        if state.awaited:
            return []
        restored = restore_commit(self.world)
        if self.world.staying and not any(action.commit for action in restored):
            why = restored[0].why if restored else "no node has the state of an earlier attempt"
            return self._restart(f"{why}; all workers are started again", all_anew=True)
        self._enter(Running(status=f"{self._workers_and_nodes}{self.world.survivors}", resize=state.resize))
        held, self.world.held_signals = self.world.held_signals, []
        return [*restored, *map(self._forward, held), *self._set_timer("more nodes may come")]

    def _forward(self, signal: SignalName) -> Action:
        nodes = self.world.running_nodes
        return ForwardSignal(attempt=self.world.attempt, nodes=nodes, signal=signal, why=f"{signal} received")

    # RUNNING -> SAVING -> STOPPING

    def _resize(self, why: str) -> list[Action]:
        """Replace a healthy world by another: all its workers save at one step first."""
        return self._save(why)

    def _save(self, why: str, *, seconds: float | None = None, ending: Finish | None = None) -> list[Action]:
        """Have all workers save at one step, within so many seconds at most if given. Then they are stopped."""
        nodes = self.world.running_nodes
        deadline = self.now + self._seconds_to_save(seconds)
        self._enter(Saving(status=why, deadline=deadline, awaited=set(nodes), ending=ending))
        if self.world.nodes <= self.leaving:
            self.world.replacements = tuple(member.node for member in self._chosen_next())
        request = RequestCheckpoint(attempt=self.world.attempt, nodes=nodes, why=why)
        return [request, *self._set_timer("all workers must have saved by then")]

    def _seconds_to_save(self, longest: float | None = None) -> float:
        """The length of SAVING. When a node is drained, the signal and its grace need time too; half is for saving."""
        left = self._seconds_until_drained()
        if longest is None:
            longest = max(MAX_SAVING_SECONDS, self.job.shutdown_timeout)
        return min(longest, max(left / 2, left - self.job.shutdown_timeout))

    def _seconds_until_drained(self) -> float:
        deadline = self.world.drain_deadline
        return math.inf if deadline is None else max(0.0, deadline - self.now - 1.0)

    def _stop_if_all_saved(self, state: Saving) -> list[Action]:
        return [] if state.awaited else self._replace(state.status, ending=state.ending)

    def _replace(self, why: str, *, ending: Finish | None = None) -> list[Action]:
        """End a healthy world that has nothing to save. If some of its workers can stay, the next begins at once."""
        if ending is None and self._some_can_stay:
            return self._restart(why)
        return self._stop_with_grace(why, ending=ending)

    @property
    def _some_can_stay(self) -> bool:
        """Whether workers of this world can stay in the next one, if it began now."""
        return self.members.enough and bool(self.world.staying_in(self._chosen_next()))

    def _stop_with_grace(self, why: str, *, ending: Finish | None = None) -> list[Action]:
        """End a healthy world. The grace ends before a drained node is taken away."""
        return self._stop(why, grace=min(self.job.shutdown_timeout, self._seconds_until_drained()), ending=ending)

    def _end_saving(self, state: Saving, why: str) -> list[Action]:
        """End a world that has broken while it saved."""
        if state.ending is None and self._some_can_stay:
            return self._restart(why)
        return self._stop(why, grace=0.0, ending=state.ending)

    def _stop_unsaved(self, state: Saving, why: str) -> list[Action]:
        """Stop waiting for checkpoints. `why`: what some workers did not do."""
        unsaved = ReportUnsaved(attempt=self.world.attempt, why=why)
        return [unsaved, *self._stop_with_grace(state.status, ending=state.ending)]

    # Any phase with a world -> STOPPING, or STARTING at once

    def _restart(self, why: str, *, backoff_until: float | None = None, all_anew: bool = False) -> list[Action]:
        """End a broken world without grace, and launch the next at once if there are nodes for it.

        `all_anew`: no worker stays.
        """
        if backoff_until is not None or not self.members.enough:
            return self._stop(why, grace=0.0, backoff_until=backoff_until)
        stop = Stop(attempt=self.world.attempt, nodes=self._present_nodes(), grace=0.0, why=why)
        return [stop, *self._launch(why, at_once=not all_anew)]

    def _stop(
        self,
        why: str,
        *,
        grace: float,
        ending: Finish | None = None,
        signal: SignalName = SIGTERM,
        backoff_until: float | None = None,
    ) -> list[Action]:
        """End the world and wait until it is gone; then comes the ending, or another attempt."""
        nodes = self._present_nodes()
        stopping = Stopping(
            status=why,
            deadline=self.now + grace + STOP_MARGIN,
            awaited=set(nodes),
            ending=ending,
            backoff_until=backoff_until,
        )
        self._enter(stopping)
        stop = Stop(attempt=self.world.attempt, nodes=nodes, grace=grace, why=why, signal=signal)
        if not nodes:
            return [stop, *self._go_on_if_all_stopped(stopping)]
        return [stop, *self._set_timer("all workers must be gone by then")]

    def _present_nodes(self) -> tuple[NodeId, ...]:
        """The nodes of the world that are still members, in rank order."""
        nodes = self.nodes
        return tuple(node for node in self.world.roster if node in nodes)

    # STOPPING -> DONE, STARTING or GATHERING

    def _go_on_if_all_stopped(self, state: Stopping) -> list[Action]:
        if state.awaited:
            return []
        if state.ending is not None:
            return self._finish(state.ending.exit_code, state.ending.why)
        if state.backoff_until is None and self.members.enough:
            return self._launch(state.status)
        gathering = Gathering(
            status=state.status,
            deadline=self.now + self.job.join_timeout,
            why=state.status,
            last_call=state.backoff_until,
            backoff_until=state.backoff_until,
        )
        self._enter(gathering)
        return [*self._release_drained(), *self._gather(gathering, gathering.why)]

    def _finish(self, exit_code: int, why: str) -> list[Action]:
        self._enter(Done(status=why))
        return [Finish(exit_code=exit_code, why=why)]

    # Time

    def _set_timer(self, why: str) -> list[Action]:
        """Ask for a `Tick` at the earliest time that matters, unless that was done already."""
        times = (*self.state.timers, self.health.next_end)
        nearest = min((at for at in times if at is not None), default=None)
        if nearest is None or nearest == self._timer_at:
            return []
        self._timer_at = nearest
        return [SetTimer(at=max(nearest, self.now), why=why)]

    def _is_due(self, at: float | None) -> bool:
        return at is not None and self.now >= at
