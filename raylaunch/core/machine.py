"""The decisions: facts in, orders out. `handle` is the only way in, and nothing here knows how orders are obeyed."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from raylaunch.core.actions import Action, Finish, Forward, Launch, Release, Stop, WakeAt
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeDraining,
    NodeJoined,
    NodeLost,
    StopAsked,
    Tick,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure, root_cause, why_hopeless
from raylaunch.core.job import Job
from raylaunch.core.ranks import Member, order
from raylaunch.core.words import count
from raylaunch.errors import ExitCode, stopped_by

STOP_MARGIN = 10.0
"""Seconds a node has, beyond the grace, to say that its workers are gone."""


class Phase(StrEnum):
    """Where the run is. Restarting, resizing and preempting are reasons for STOPPING, not phases."""

    GATHERING = "gathering"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class Machine:
    """The state of one run.

    Each phase that waits has a deadline. Attempts count 1, 2, 3; a word from another attempt than the present one
    changes nothing. The roster is in rank order; all and only its nodes run workers of the present attempt.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.phase = Phase.GATHERING
        self.status = "waiting for nodes"
        self.now = 0.0
        self.attempt = 0
        self.restarts = 0
        #: All and only the nodes that joined and were neither lost nor given up.
        self.nodes: dict[str, Member] = {}
        self.roster: tuple[str, ...] = ()
        #: How many workers the roster was given.
        self.workers = 0
        #: Nodes of the roster that have still to say what the phase waits for: started, finished or stopped.
        self.awaited: set[str] = set()
        self.finished: set[str] = set()
        self.failures: list[Failure] = []
        self.causes: list[tuple[float, str]] = []
        #: In STOPPING: the end that follows. None: another attempt.
        self.ending: Finish | None = None
        self.deadline: float | None = None
        self.last_call: float | None = None
        self._woken: float | None = None

    def start(self) -> list[Action]:
        """The first orders, before any event: begin to wait for nodes."""
        self.deadline = self.job.placement_timeout
        return self._wake("the cluster must give the nodes by then")

    def handle(self, event: Event) -> list[Action]:
        """Take one fact, answer with the orders that follow from it."""
        self.now = max(self.now, event.at)
        if self.phase is Phase.DONE or self._is_stale(event):
            return []
        match event:
            case NodeJoined():
                return self._node_joined(event)
            case NodeLost():
                return self._node_lost(event.node, event.why)
            case NodeDraining():
                return self._node_draining(event)
            case WorkersStarted():
                return self._workers_started(event)
            case WorkersExited():
                return self._workers_exited(event)
            case WorkersStopped():
                return self._workers_stopped(event)
            case StopAsked() | ForwardAsked():
                return self._signal_came(event)
            case Tick():
                return self._tick()
            case _:
                assert_never(event)

    def _is_stale(self, event: Event) -> bool:
        """The one place where words from a past attempt, or of a node we gave up, are dropped."""
        match event:
            case WorkersStarted() | WorkersExited() | WorkersStopped():
                return event.attempt != self.attempt or event.node not in self.nodes or event.node not in self.roster
            case NodeLost() | NodeDraining():
                return event.node not in self.nodes
            case _:
                return False

    # Nodes come and go.

    def _node_joined(self, event: NodeJoined) -> list[Action]:
        self.nodes[event.node] = Member(node=event.node, address=event.address, nproc=event.nproc)
        if self.phase is Phase.GATHERING:
            return self._gather(f"{event.node} joined")
        if self.phase in (Phase.STARTING, Phase.RUNNING) and self._could_grow() and self.last_call is None:
            self.last_call = self.now + self.job.last_call
            return self._wake(f"{event.node} joined; more may come")
        return []

    def _node_lost(self, node: str, why: str) -> list[Action]:
        del self.nodes[node]
        self.awaited.discard(node)
        if self.phase is Phase.GATHERING:
            return self._gather(f"{node} was lost: {why}")
        if node not in self.roster:
            return []
        if self.phase is Phase.STOPPING:
            return self._stopped_so_far()
        if node in self.finished:
            return self._all_finished()
        return self._begin_again(f"{node} was lost: {why}")

    def _node_draining(self, event: NodeDraining) -> list[Action]:
        self.nodes[event.node] = replace(self.nodes[event.node], draining=True)
        why = f"{event.node} is being drained: {event.why}"
        if event.node in self._unfinished() and self.phase in (Phase.STARTING, Phase.RUNNING):
            grace = max(0.0, min(self.job.shutdown_timeout, event.deadline - self.now))
            return self._stop(why, grace=grace)
        return self._gather(why) if self.phase is Phase.GATHERING else []

    # Workers start, end and are stopped.

    def _workers_started(self, event: WorkersStarted) -> list[Action]:
        if self.phase is not Phase.STARTING:
            return []
        self.awaited.discard(event.node)
        if self.awaited:
            return []
        self.phase = Phase.RUNNING
        self.deadline = None
        self.status = f"{count(self.workers, 'worker')} on {count(len(self.roster), 'node')}"
        return self._wake("more nodes may come")

    def _workers_exited(self, event: WorkersExited) -> list[Action]:
        self.failures.extend(event.failures)
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return []
        if not event.failures:
            self.finished.add(event.node)
            return self._all_finished()
        return self._workers_failed(root_cause(event.failures) or event.failures[0])

    def _workers_failed(self, cause: Failure) -> list[Action]:
        what = f"rank {cause.rank} on {cause.node} {cause.what}"
        hopeless = why_hopeless(cause, self.causes, self.now)
        self.causes.append((self.now, cause.signature))
        if hopeless or self.restarts >= self.job.max_restarts:
            end = f"{what}; {hopeless or self._budget()}"
            ending = Finish(exit_code=ExitCode.JOB_FAILED, why=end)
            return self._stop(end, grace=self.job.shutdown_timeout, ending=ending)
        self.restarts += 1
        return self._begin_again(f"{what}; restart {self.restarts} of {self.job.max_restarts}")

    def _budget(self) -> str:
        used = self.job.max_restarts
        if used == 0:
            return "no restarts were allowed"
        return "the only restart is used" if used == 1 else f"all {used} restarts are used"

    def _workers_stopped(self, event: WorkersStopped) -> list[Action]:
        self.failures.extend(event.failures)
        if self.phase is not Phase.STOPPING:
            return []
        self.awaited.discard(event.node)
        return self._stopped_so_far()

    def _all_finished(self) -> list[Action]:
        if self._unfinished():
            return []
        return self._finish(
            ExitCode.OK, "the worker finished" if self.workers == 1 else f"all {self.workers} workers finished"
        )

    # People and time.

    def _signal_came(self, event: StopAsked | ForwardAsked) -> list[Action]:
        return self._stop_asked(event) if isinstance(event, StopAsked) else self._forward_asked(event)

    def _stop_asked(self, event: StopAsked) -> list[Action]:
        code = stopped_by(signals.Signals[event.signal])
        ending = Finish(exit_code=code, why=f"stopped by {event.signal}")
        if self.phase is Phase.GATHERING:
            return self._finish(ending.exit_code, ending.why)
        if self.phase is not Phase.STOPPING:
            why = f"{event.signal} received"
            return self._stop(why, grace=self.job.shutdown_timeout, ending=ending, signal=event.signal)
        if self.ending is None:
            self.ending = ending
            return []
        at_once = Stop(attempt=self.attempt, nodes=self._alive(self.roster), grace=0.0, why=f"{event.signal} again")
        return [at_once, *self._finish(self.ending.exit_code, self.ending.why)]

    def _forward_asked(self, event: ForwardAsked) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []  # workers that are not there, or so young that they cannot have a handler for it
        nodes = tuple(node for node in self.roster if node in self._unfinished())
        return [Forward(attempt=self.attempt, nodes=nodes, signal=event.signal, why=f"{event.signal} received")]

    def _tick(self) -> list[Action]:
        self._woken = None
        if self.deadline is not None and self.now >= self.deadline:
            return self._deadline_passed()
        if self.last_call is not None and self.now >= self.last_call:
            self.last_call = None
            if self.phase is Phase.GATHERING:
                return self._launch(f"{self.status}; last call is over")
            if self.phase in (Phase.STARTING, Phase.RUNNING) and self._could_grow():
                return self._stop("nodes joined", grace=self.job.shutdown_timeout)
        return self._wake("the time has not come")

    def _deadline_passed(self) -> list[Action]:
        self.deadline = None
        if self.phase is Phase.GATHERING:
            have, want = len(self._usable()), self.job.min_nodes
            if have >= want:  # the time was shorter than the last call
                return self._launch(f"{self.status}; no more time to wait")
            waited = self.job.placement_timeout if self.attempt == 0 else self.job.join_timeout
            return self._finish(ExitCode.UNAVAILABLE, f"{have} of {want} nodes after {waited:g} s")
        starting = self.phase is Phase.STARTING
        why = f"did not {'start' if starting else 'stop'} its workers in time"
        given_up = sorted(self.awaited)
        self.awaited.clear()
        for node in given_up:
            del self.nodes[node]
        releases = [Release(node=node, why=why) for node in given_up]
        next_step = self._begin_again(f"{', '.join(given_up)} {why}") if starting else self._stopped_so_far()
        return [*releases, *next_step]

    # What follows.

    def _gather(self, why: str) -> list[Action]:
        """In GATHERING: launch if there are enough nodes, else say what is missing."""
        usable = self._usable()
        low, high = self.job.min_nodes, self.job.max_nodes
        self.status = f"{len(usable)} of {_span(low, high)} nodes"
        if len(usable) >= high:
            return self._launch(f"{self.status}; {why}")
        if len(usable) < low:
            self.last_call = None
        elif self.last_call is None:
            self.last_call = self.now + self.job.last_call
        return self._wake(self.status)

    def _launch(self, why: str) -> list[Action]:
        members = order(self._usable(), self.roster)[: self.job.max_nodes]
        self.attempt += 1
        self.roster = tuple(member.node for member in members)
        self.workers = sum(member.nproc for member in members)
        self.awaited = set(self.roster)
        self.finished = set()
        self.failures = []
        self.phase = Phase.STARTING
        self.deadline = self.now + self.job.start_timeout
        self.last_call = None
        self.status = f"starting {count(self.workers, 'worker')} on {count(len(self.roster), 'node')}"
        launch = Launch(attempt=self.attempt, roster=self.roster, why=why)
        return [launch, *self._wake("all workers must be started by then")]

    def _begin_again(self, why: str) -> list[Action]:
        """The world is broken: end it without grace, and start the next at once if there are nodes for it."""
        if len(self._usable()) < self.job.min_nodes:
            return self._stop(why, grace=0.0)
        stop = Stop(attempt=self.attempt, nodes=self._alive(self.roster), grace=0.0, why=why)
        return [stop, *self._launch(why)]

    def _stop(self, why: str, *, grace: float, ending: Finish | None = None, signal: str = "SIGTERM") -> list[Action]:
        """End the attempt and wait for it; then comes the ending, or another attempt."""
        self.phase = Phase.STOPPING
        self.status = why
        self.ending = ending
        self.awaited = set(self._alive(self.roster))
        self.last_call = None
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
        why = self.status
        self.phase = Phase.GATHERING
        self.deadline = self.now + self.job.join_timeout
        if len(self._usable()) >= self.job.min_nodes:
            return self._launch(why)
        return self._gather(why)

    def _finish(self, exit_code: int, why: str) -> list[Action]:
        self.phase = Phase.DONE
        self.status = why
        self.deadline = self.last_call = None
        return [Finish(exit_code=exit_code, why=why)]

    def _wake(self, why: str) -> list[Action]:
        """Ask to be woken at the nearest deadline, once for each."""
        nearest = min((at for at in (self.deadline, self.last_call) if at is not None), default=None)
        if nearest is None or nearest == self._woken:
            return []
        self._woken = nearest
        return [WakeAt(at=max(nearest, self.now), why=why)]

    # What is true of the nodes.

    def _usable(self) -> tuple[Member, ...]:
        return tuple(member for member in self.nodes.values() if not member.draining)

    def _could_grow(self) -> bool:
        """A world that has begun to finish is not disturbed for more nodes."""
        return not self.finished and len(self.roster) < min(len(self._usable()), self.job.max_nodes)

    def _unfinished(self) -> set[str]:
        return {node for node in self._alive(self.roster) if node not in self.finished}

    def _alive(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.nodes)


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
