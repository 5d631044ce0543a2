"""The state of one run: what the functions of this package read, and change as they decide.

`Run` has questions about the state, and the three steps of which every transition is made: enter a phase, set the
timer, finish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Action, Finish, SetTimer
from raylaunch.core.machine.membership import Membership
from raylaunch.core.machine.restart_policy import NEEDED_EXCLUSION, CrashLoopBackoff, HostHealth, RestartBudget
from raylaunch.core.machine.save_time import STOP_MARGIN, Deadline, Timing
from raylaunch.core.machine.state import (
    TRANSITIONS,
    Done,
    Gathering,
    Phase,
    Saving,
    State,
    Stopping,
    World,
)
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count


@dataclass(slots=True)
class Reachability:
    """What is known of whether the nodes of a run can connect to each other."""

    proven: bool = False
    """Whether any attempt has made a step."""
    broken_since: float | None = None
    """Since when nodes that cannot reach each other have all been needed. None: not since the latest step."""


class Run:
    """The state of one run."""

    def __init__(self, job: Job) -> None:
        #: The job as it was started.
        self.started_as = job
        #: The job with the bounds that hold now.
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
        #: The least number of nodes that was requested. `job.min_nodes` is less until as many nodes have been there.
        self.wanted_nodes = job.min_nodes
        self.reachability = Reachability()
        self.timing = Timing()

    # Questions

    @property
    def phase(self) -> Phase:
        """The phase that the machine is in."""
        return self.state.phase

    @property
    def nodes(self) -> dict[NodeId, Member]:
        """All nodes that joined and were neither lost nor released, by name."""
        return self.members.nodes

    @property
    def leaving(self) -> frozenset[NodeId]:
        """The nodes that are drained and, while all save for the next world, the nodes that it does not have."""
        drained = frozenset(node for node, member in self.nodes.items() if member.draining)
        if not isinstance(self.state, Saving) or self.state.ending is not None or not self.members.enough:
            return drained
        return drained | self.world.nodes - {member.node for member in self.chosen_next()}

    @property
    def is_ending(self) -> bool:
        """Whether the run ends as soon as its workers have."""
        return isinstance(self.state, Saving | Stopping) and self.state.ending is not None

    @property
    def is_resized(self) -> bool:
        """Whether a person has requested other bounds than the job had."""
        return self.job is not self.started_as

    @property
    def some_can_stay(self) -> bool:
        """Whether workers of this world can stay in the next one, if it began now."""
        return self.members.enough and bool(self.world.staying_in(self.chosen_next()))

    @property
    def workers_and_nodes(self) -> str:
        """The size of the world, for a person."""
        return f"{count(self.world.size, 'worker')} on {count(len(self.world.roster), 'node')}"

    def chosen_next(self) -> tuple[Member, ...]:
        """Return the nodes of the next world, if it began now. Nodes with copies of the last commit come first."""
        survivors = (*self.members.successors(self.world.members), *self.world.replacements)
        return self.members.choose(survivors, last=self.health.doubtful)

    def present_nodes(self) -> tuple[NodeId, ...]:
        """Return the nodes of the world that are still members, in rank order."""
        nodes = self.nodes
        return tuple(node for node in self.world.roster if node in nodes)

    @property
    def seconds_left(self) -> float:
        """How long the workers may still run before the run must be over, or a node of the world is taken away."""
        ends = [each.at for each in (self.timing.deadline, self.world.deadline) if each is not None]
        return max(0.0, min(ends, default=math.inf) - self.now - 1.0)

    def latest_save(self, deadline: Deadline) -> float:
        """Return when to ask the workers to save, so that they are gone by then."""
        least = self.job.shutdown_timeout
        return deadline.latest(self.timing.save.expected(deadline, least) + least + STOP_MARGIN)

    @property
    def end_at(self) -> float | None:
        """When to begin to end the run, so that it is over in time; None: never, or that has begun."""
        return None if self.timing.deadline is None or self.is_ending else self.latest_save(self.timing.deadline)

    def is_due(self, at: float | None) -> bool:
        """Return whether this time has come. None: it never does."""
        return at is not None and self.now >= at

    # Changes

    def set_bounds(self, low: int, high: int) -> None:
        """Take these bounds of the number of nodes from now on."""
        self.job = replace(self.job, nnodes=f"{low}:{high}")
        self.members.set_bounds(self.job)

    def enter(self, state: State) -> None:
        """Enter a phase, which the table of transitions must allow."""
        assert state.phase in TRANSITIONS[self.phase], f"{state.phase} cannot follow {self.phase}"
        self.state = state

    def finish(self, exit_code: int, why: str) -> list[Action]:
        """End the run."""
        self.enter(Done(status=why, exit_code=exit_code))
        return [Finish(exit_code=exit_code, why=why)]

    def set_timer(self, why: str) -> list[Action]:
        """Ask for a `Tick` at the earliest time that matters, unless that was done already."""
        times = (*self.state.timers, self.health.next_end, self.end_at)
        nearest = min((at for at in times if at is not None), default=None)
        if nearest is None or nearest == self.timing.timer_at:
            return []
        self.timing.timer_at = nearest
        return [SetTimer(at=max(nearest, self.now), why=why)]
