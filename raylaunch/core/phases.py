"""Where a run is, and the ways from one phase to the next. What happened, and which way is taken, is the machine's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import StrEnum

from raylaunch.core.actions import Action, AskCheckpoint, Finish, Launch, Release, Shun, Stop, WakeAt
from raylaunch.core.budget import Budget
from raylaunch.core.failure import Failure
from raylaunch.core.health import NEEDED_COOLING, CrashLoop, Health
from raylaunch.core.job import Job
from raylaunch.core.ranks import Member
from raylaunch.core.words import count
from raylaunch.core.world import Members

MOST_SAVING = 600.0
"""Seconds for all workers to come to a step and save, unless a node goes before: steps and checkpoints may be large."""
STOP_MARGIN = 10.0
"""Seconds a node has, beyond the grace, to say that its workers are gone."""


class Phase(StrEnum):
    """Where the run is. Restarting, resizing and preempting are reasons for STOPPING, not phases."""

    GATHERING = "gathering"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class Phases:
    """The state of one run, and every step from one phase to another; each gives the orders that go with it.

    Each phase that waits has a deadline. The roster is in rank order; all and only its nodes run workers of the present
    attempt.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.phase = Phase.GATHERING
        self.status = "waiting for nodes"
        self.now = 0.0
        self.attempt = 0
        self.budget = Budget(job.max_restarts)
        self.members = Members(job)
        self.health = Health(job.exclude_after, needed_cooling=min(NEEDED_COOLING, job.join_timeout / 2))
        self.crashes = CrashLoop()
        self.roster: tuple[str, ...] = ()
        self._roster: frozenset[str] = frozenset()
        #: How many workers the roster was given.
        self.workers = 0
        self.launched_at = 0.0
        #: Nodes of the roster that have still to say what the phase waits for: started, finished, saved or stopped.
        self.awaited: set[str] = set()
        #: Nodes of the roster that are there and whose workers have not all ended well.
        self.unfinished: set[str] = set()
        #: Some node's workers have all ended well: the world is coming to its end by itself.
        self.finishing = False
        self.failures: list[Failure] = []
        #: Signals to forward that came while workers were being started: each once, for when all of them run.
        self.held: list[str] = []
        #: In STOPPING: the workers were asked to save, and nothing has been done to them yet.
        self.asking = False
        #: What ended the last world, or made it end.
        self.why = ""
        #: In STOPPING: the end that follows. None: another attempt.
        self.ending: Finish | None = None
        self.deadline: float | None = None
        #: When nodes that joined are taken into the world.
        self.last_call: float | None = None
        #: When the world must leave nodes that are being drained: before it, should there be enough others.
        self.evacuation: float | None = None
        #: When all that is left of a drained node's time is over.
        self.drained_at: float | None = None
        #: No attempt before this: the script crashes again and again.
        self.not_before: float | None = None
        self._woken: float | None = None

    @property
    def nodes(self) -> dict[str, Member]:
        """All and only the nodes that joined and were neither lost nor given up."""
        return self.members.nodes

    @property
    def restarts(self) -> int:
        """How many were spent on failures of workers."""
        return self.budget.spent

    def start(self) -> list[Action]:
        """The first orders, before any event: begin to wait for nodes."""
        self.deadline = self.job.placement_timeout
        return self._wake("the cluster must give the nodes by then")

    def _gather(self, why: str) -> list[Action]:
        """In GATHERING: launch if there are enough nodes, else say what is missing."""
        have, low, high = len(self.members), self.job.min_nodes, self.job.max_nodes
        enough = self.members.enough
        self.status = f"{have} of {_span(low, high)} nodes"
        if have >= low and not enough:
            self.status += f", but no world size that is a multiple of {self.job.multiple_of}"
        if self.not_before is not None and self.now < self.not_before:
            return self._wake(self.status)
        self.not_before = None
        if enough and (have >= high or self._is_due(self.last_call)):
            return self._launch(f"{self.status}; {why if have >= high else 'last call is over'}")
        if not enough:
            self.last_call = None
            self.health.hurry(self.now)
        elif self.last_call is None:
            self.last_call = self.now + self.job.last_call
        return self._wake(self.status)

    def _launch(self, why: str) -> list[Action]:
        chosen = self.members.choose(self.roster, last=self.health.doubtful)
        self.attempt += 1
        self.roster = tuple(member.node for member in chosen)
        self._roster = frozenset(self.roster)
        self.workers = sum(member.nproc for member in chosen)
        self.awaited = set(self.roster)
        self.unfinished = set(self.roster)
        self.finishing = False
        self.failures = []
        self.phase = Phase.STARTING
        self.launched_at = self.now
        self.deadline = self.now + self.job.start_timeout
        self.last_call = self.evacuation = self.drained_at = self.not_before = None
        self.status = f"starting {count(self.workers, 'worker')} on {count(len(self.roster), 'node')}"
        launch = Launch(attempt=self.attempt, roster=self.roster, why=why)
        return [launch, *self._let_go(), *self._wake("all workers must be started by then")]

    def _let_go(self, kept: Collection[str] = ()) -> list[Action]:
        """Nodes that are being drained, but these, have no part any more: the sooner they are free, the better."""
        drained = [node for node, member in self.nodes.items() if member.draining and node not in kept]
        for node in drained:
            self.members.remove(node)
        return [Release(node=node, why="it is being drained") for node in drained]

    def _begin_again(self, why: str) -> list[Action]:
        """The world is broken: end it without grace, and start the next at once if there are nodes for it."""
        if self.not_before is not None or not self.members.enough:
            return self._stop(why, grace=0.0)
        stop = Stop(attempt=self.attempt, nodes=self._alive(self.roster), grace=0.0, why=why)
        return [stop, *self._launch(why)]

    def _resize(self, why: str) -> list[Action]:
        """A world that is well is to become another: let it save first, all workers at one step."""
        self.phase = Phase.STOPPING
        self.asking = True
        self.status = why
        self.ending = None
        self.awaited = set(self.unfinished)
        self.last_call = self.evacuation = None
        self.deadline = self.now + self._time_to_save()
        nodes = tuple(node for node in self.roster if node in self.unfinished)
        ask = AskCheckpoint(attempt=self.attempt, nodes=nodes, why=why)
        return [ask, *self._wake("all workers must have saved by then")]

    def _time_to_save(self) -> float:
        """Where a drained node goes, what its time leaves beside a signal and its grace; half of it at least."""
        left = self._time_left()
        most = max(MOST_SAVING, self.job.shutdown_timeout)
        return min(most, max(left / 2, left - self.job.shutdown_timeout))

    def _time_left(self) -> float:
        """Until a drained node of the world goes."""
        return math.inf if self.drained_at is None else max(0.0, self.drained_at - self.now - 1.0)

    def _asked_so_far(self) -> list[Action]:
        return [] if self.awaited else self._signal_workers()

    def _signal_workers(self) -> list[Action]:
        """Those that saved wait for it; to the others it is the first word."""
        return self._stop(self.status, grace=min(self.job.shutdown_timeout, self._time_left()))

    def _stop(self, why: str, *, grace: float, ending: Finish | None = None, signal: str = "SIGTERM") -> list[Action]:
        """End the attempt and wait for it; then comes the ending, or another attempt."""
        self.phase = Phase.STOPPING
        self.asking = False
        self.status = why
        self.ending = ending
        self.awaited = set(self._alive(self.roster))
        self.last_call = self.evacuation = None
        self.deadline = self.now + grace + STOP_MARGIN
        stop = Stop(attempt=self.attempt, nodes=self._alive(self.roster), grace=grace, why=why, signal=signal)
        if not self.awaited:
            return [stop, *self._stopped_so_far()]
        return [stop, *self._wake("all workers must be gone by then")]

    def _stopped_so_far(self) -> list[Action]:
        if self.awaited:
            return []
        if self.ending is not None:
            return self._finish(self.ending.exit_code, self.ending.why)
        self.why = self.status
        self.phase = Phase.GATHERING
        self.deadline = self.now + self.job.join_timeout
        self.last_call = self.not_before
        if self.not_before is None and self.members.enough:
            return self._launch(self.why)
        return [*self._let_go(), *self._gather(self.why)]

    def _finish(self, exit_code: int, why: str) -> list[Action]:
        self.phase = Phase.DONE
        self.status = why
        self.deadline = self.last_call = None
        return [Finish(exit_code=exit_code, why=why)]

    def _wake(self, why: str) -> list[Action]:
        """Ask to be woken at the nearest time that matters, once for each."""
        times = [self.deadline, self.health.next_cooled]
        if self.phase is Phase.GATHERING:
            times += [self.last_call, self.not_before]
        elif self.phase is Phase.RUNNING:
            times += [self.last_call, self.evacuation]
        nearest = min((at for at in times if at is not None), default=None)
        if nearest is None or nearest == self._woken:
            return []
        self._woken = nearest
        return [WakeAt(at=max(nearest, self.now), why=why)]

    # Nodes that are given up.

    def _give_up(self, node: str) -> Member:
        """It counts no more, and nobody waits for it."""
        self.awaited.discard(node)
        self.unfinished.discard(node)
        return self.members.remove(node)

    def _leave_out(self, node: str, host: str, *, needed: bool) -> tuple[list[Action], str]:
        """The host of this node failed once too often: take it out of the world. And how to say so."""
        nodes = self.members.on(host)
        for each in nodes:
            self._give_up(each)
        seconds = self.health.exclude(host, self.now, needed=needed)
        but = ", unless no other comes" if needed else ""
        why = f"{node} is left out for {seconds:g} s after {count(self.job.exclude_after, 'failure')}{but}"
        return [Shun(host=host, why=why), *(Release(node=each, why=why) for each in nodes)], f"; {why}"

    def _blame_for_going(self, gone: Member) -> tuple[list[Action], str]:
        """That a node is gone is a failure of its host. Who is needed may come back at once."""
        if gone.draining or gone.host in self.health.excluded:
            return [], ""
        bad = self.health.blame(gone.host, self.now)
        if not bad or not self.members.enough_without(gone.host):
            return [], ""
        return self._leave_out(gone.node, gone.host, needed=False)

    def _give_up_silent(self, why: str) -> tuple[list[Action], str]:
        found: list[Action] = []
        silent = sorted(self.awaited)
        what = f"{', '.join(silent)} {why}"
        for member in [self._give_up(node) for node in silent]:
            left_out, why_out = self._blame_for_going(member)
            found += [Release(node=member.node, why=why), *left_out]
            what += why_out
        return found, what

    def _is_due(self, at: float | None) -> bool:
        return at is not None and self.now >= at

    def _alive(self, names: Iterable[str]) -> tuple[str, ...]:
        nodes = self.nodes
        return tuple(name for name in names if name in nodes)


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
