"""The status of a run while it lasts, computed from its journal alone, as its result is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from raylaunch.core.history.step_rates import behind
from raylaunch.core.history.time_per_state import StatesBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Finish,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    Release,
    RequestCheckpoint,
    ResizeRequested,
    Stop,
    WorkersCheckpointed,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import NodeId, StrEnum
from raylaunch.core.placement.devices import GpuUse
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.result import ResultBuilder, RunResult
from raylaunch.core.text import host_list


class NodeState(StrEnum):
    """What a node does in a run."""

    GRANTED = "granted"
    """The cluster gave its resources; its agent is starting."""
    IDLE = "idle"
    """It is ready and runs no workers: a spare one, or one between two attempts, or after the last one."""
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    """All of its workers have ended with exit code 0, and others have not."""
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """A node of a run that has not been lost or released."""

    name: NodeId
    address: str
    state: NodeState
    draining: bool
    """Whether it will be taken away."""
    workers: int
    """The workers that it runs, or could run."""
    first_rank: int | None
    """The rank of its first worker; the others follow. None: it is not part of the attempt."""
    pids: tuple[int, ...]
    """The process ids of its workers, by local rank; empty if they are not known or not running."""
    memory: NodeMemory | None = None
    """What it holds for the script, by the latest report; None: nothing that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run is. `result` has its attempts; unless the phase is DONE, its exit code means nothing."""

    phase: Phase
    why: str
    """Why it is in this phase."""
    waits_for: str
    """What it waits for, for a person; "" if it trains, or is done."""
    attempt: int
    """The number of the present or last attempt; 0 before the first."""
    world_size: int
    """The workers of that attempt."""
    roster: tuple[NodeId, ...]
    """The nodes of that attempt, in rank order."""
    nodes: tuple[NodeSummary, ...]
    """Those of the roster in rank order, then the others."""
    progress: Progressed | None
    """The latest report of steps, which may be of an earlier attempt."""
    behind: int
    """The steps by which its slowest rank is behind the one furthest ahead; 0: hardly any, or that is not known."""
    steps_per_second: float | None
    """None: the workers are not running, or their rate is not known yet."""
    goodput: float | None
    """The part of the time until the latest event in which the run trained, from 0 to 1; None if no time has passed."""
    result: RunResult

    @property
    def gpus(self) -> tuple[GpuUse, ...]:
        """The GPUs of the ranks, by the latest reports."""
        uses = (use for node in self.nodes if node.memory is not None for use in node.memory.gpus)
        return tuple(sorted(uses, key=lambda use: use.rank))


@dataclass(slots=True, kw_only=True)
class _KnownNode:
    address: str
    workers: int = 0
    has_joined: bool = False
    is_draining: bool = False
    pids: tuple[int, ...] = ()
    memory: NodeMemory | None = None


class _LatestAttempt:
    """The attempt that was launched last: the ranks of its nodes, and which of these have finished."""

    def __init__(self, number: int, roster: Collection[NodeId], nodes: Mapping[NodeId, _KnownNode]) -> None:
        workers = [nodes[node].workers if node in nodes else 0 for node in roster]
        self.number = number
        #: By node of the roster, in its order: the rank of its first worker.
        self.first_ranks = dict(zip(roster, accumulate(workers, initial=0), strict=False))
        self.world_size = sum(workers)
        #: Nodes whose workers have all ended with exit code 0.
        self.finished: set[NodeId] = set()

    def unfinished(self, nodes: Collection[NodeId]) -> list[NodeId]:
        """Return which of the nodes take part and have not finished."""
        return [node for node in self.first_ranks if node in nodes and node not in self.finished]

    def order(self, node: NodeId) -> tuple[float, str]:
        """Return the key that sorts nodes: those that take part in rank order, then the others."""
        return self.first_ranks.get(node, math.inf), node


class StatusBuilder:
    """Computes the status from the entries of the journal, one after the other, with limited memory.

    The phase follows from what the driver recorded, not from a replay: the journal may be of another version.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.results = ResultBuilder()
        self._states = StatesBuilder()
        self._nodes: dict[NodeId, _KnownNode] = {}
        self._phase = Phase.GATHERING
        self._why = ""
        #: Nodes of which an answer is awaited in this phase.
        self._awaited: set[NodeId] = set()
        self._attempt = _LatestAttempt(0, (), {})
        self._progress: Progressed | None = None
        #: Whether that is the first report of its attempt, whose rate may be 0 since there was no time to measure it.
        self._is_first_report = False

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        self.results.add(entry)
        self._states.add(entry)
        if entry.event is not None:
            self._note_node(entry.event)
            self._note_workers(entry.event)
        for action in entry.actions:
            self._note_action(action)
        if not self._awaited and self._phase is Phase.STARTING:
            self._phase = Phase.RUNNING
        elif not self._awaited and self._phase is Phase.STOPPING:
            self._phase = Phase.GATHERING

    def _note_node(self, event: Event) -> None:
        match event:
            case NodeGranted(node=node):
                self._nodes[node] = _KnownNode(address=event.address)
            case NodeJoined(node=node):
                self._nodes[node] = _KnownNode(address=event.address, workers=event.nproc, has_joined=True)
            case NodeLost(node=node):
                self._remove(node)
            case NodeDraining(node=node) if node in self._nodes:
                self._nodes[node].is_draining = True
            case ResizeRequested(min_nodes=low, max_nodes=high):
                self._job = replace(self._job, nnodes=f"{low}:{high}")
            case _:
                pass

    def _remove(self, node: NodeId) -> None:
        self._nodes.pop(node, None)
        self._awaited.discard(node)

    def _note_workers(self, event: Event) -> None:
        match event:
            case Progressed():
                self._is_first_report = self._progress is None or self._progress.attempt != event.attempt
                self._progress = event
                for memory in event.memory:
                    if memory.node in self._nodes:
                        self._nodes[memory.node].memory = memory
            case WorkersStarted(node=node) if event.attempt == self._attempt.number:
                if node in self._nodes:
                    self._nodes[node].pids = event.pids
                self._answered(node, Phase.STARTING)
            case WorkersExited(node=node, failures=()) if event.attempt == self._attempt.number:
                self._attempt.finished.add(node)
                self._answered(node, Phase.STARTING, Phase.SAVING)
            case WorkersCheckpointed(node=node, step=int()) if event.attempt == self._attempt.number:
                self._answered(node, Phase.SAVING)
            case WorkersStopped(node=node) if event.attempt == self._attempt.number:
                self._answered(node, Phase.STOPPING)
            case _:
                pass

    def _answered(self, node: NodeId, *phases: Phase) -> None:
        if self._phase in phases:
            self._awaited.discard(node)

    def _note_action(self, action: Action) -> None:
        match action:
            case Launch():
                self._attempt = _LatestAttempt(action.attempt, action.roster, self._nodes)
                self._enter(Phase.STARTING, action.why, action.roster)
            case RequestCheckpoint():
                self._enter(Phase.SAVING, action.why, action.nodes)
            case Stop():
                self._enter(Phase.STOPPING, action.why, action.nodes)
            case Release(node=node):
                self._remove(node)
            case Finish():
                self._enter(Phase.DONE, action.why, ())
            case _:
                pass

    def _enter(self, phase: Phase, why: str, awaited: Collection[NodeId]) -> None:
        self._phase, self._why, self._awaited = phase, why, set(awaited)

    def status(self, *, run_dir: str = "", began: str = "") -> RunStatus:
        """Return the status as far as the entries tell it. `began` is in the journal's first line."""
        return RunStatus(
            phase=self._phase,
            why=self._why,
            waits_for=self._waits_for(),
            attempt=self._attempt.number,
            world_size=self._attempt.world_size,
            roster=tuple(self._attempt.first_ranks),
            nodes=tuple(self._node_status(name) for name in sorted(self._nodes, key=self._attempt.order)),
            progress=self._progress,
            behind=behind(self._progress) if self._progress is not None and not self._is_first_report else 0,
            steps_per_second=self._rate(),
            goodput=self._states.goodput(progress=self._progress if self._rate() is not None else None),
            result=self.results.result(run_dir=run_dir, began=began),
        )

    def _rate(self) -> float | None:
        progress = self._progress
        if progress is None or progress.attempt != self._attempt.number or not self._phase.is_training:
            return None
        return None if self._is_first_report and not progress.rate else progress.rate

    def _node_status(self, name: NodeId) -> NodeSummary:
        node = self._nodes[name]
        state = self._state_of(name)
        return NodeSummary(
            name=name,
            address=node.address,
            state=state,
            draining=node.is_draining,
            workers=node.workers,
            first_rank=self._attempt.first_ranks.get(name),
            pids=node.pids if state in (NodeState.RUNNING, NodeState.STOPPING) else (),
            memory=node.memory,
        )

    def _state_of(self, name: NodeId) -> NodeState:
        if not self._nodes[name].has_joined:
            return NodeState.GRANTED
        if name not in self._attempt.first_ranks or self._phase in (Phase.GATHERING, Phase.DONE):
            return NodeState.IDLE
        if self._phase is Phase.STOPPING:
            return NodeState.STOPPING if name in self._awaited else NodeState.IDLE
        if name in self._attempt.finished:
            return NodeState.FINISHED
        return NodeState.STARTING if self._phase is Phase.STARTING and name in self._awaited else NodeState.RUNNING

    def _waits_for(self) -> str:
        match self._phase:
            case Phase.GATHERING:
                return self._missing_nodes()
            case Phase.STARTING:
                return f"{_names(self._awaited)} to start workers"
            case Phase.RUNNING if self._attempt.finished:
                return f"{_names(self._attempt.unfinished(self._nodes))} to finish, as others have"
            case Phase.SAVING:
                return f"{_names(self._awaited)} to save"
            case Phase.STOPPING:
                return f"{_names(self._awaited)} to end workers"
            case _:
                return ""

    def _missing_nodes(self) -> str:
        have = sum(node.has_joined and not node.is_draining for node in self._nodes.values())
        low, high = self._job.min_nodes, self._job.max_nodes
        wanted = f"{low}" if low == high else f"{low} to {high}"
        return f"nodes: {have} of {wanted} are ready"


def _names(nodes: Collection[NodeId]) -> str:
    return host_list(sorted(nodes, key=lambda name: (len(name), name)))
