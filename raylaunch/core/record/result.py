"""The result of a run, computed from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raylaunch.core.failures.failure import Failure, alike, consequences, root_cause
from raylaunch.core.failures.hints import hints
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.machine.events_and_actions import (
    Finish,
    Launch,
    NodeJoined,
    NodeLost,
    Progressed,
    Stop,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.steps import StepHistory
from raylaunch.errors import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, from its `Launch` to its `Stop`. Times are in seconds since the run began."""

    number: int
    roster: tuple[NodeId, ...]
    launched_at: float
    running_at: float | None
    """When all workers were started; None if they never were."""
    ended_at: float
    why_launched: str
    why_ended: str
    failures: tuple[Failure, ...]
    world_size: int = 0
    lost: tuple[NodeId, ...] = ()
    """Nodes that were lost during the attempt."""
    steps: int = 0
    """The reported steps of the worker that was furthest ahead."""
    first_step: int | None = None
    last_step: int | None = None
    """Numbers of the script, or else of its optimizer; None if there are none."""
    lost_steps: int | None = None
    """Steps of earlier attempts that were done again. None for the first attempt, and for steps without numbers."""
    pause: float | None = None
    """Seconds from the last step of earlier attempts until all workers had done one. None for the first attempt."""
    stacks: tuple[StackGroup, ...] = ()
    """If it hung: what all workers were doing, the suspects first."""

    @property
    def unheard(self) -> tuple[int, ...]:
        """Ranks without a failure, which ended with exit code 0. Empty if nodes were lost."""
        if self.lost:
            return ()
        heard = {failure.rank for failure in self.failures}
        return tuple(rank for rank in range(self.world_size) if rank not in heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. `cause` is the root cause of its end; None if no worker's failure ended it."""

    exit_code: int
    why: str
    seconds: float
    restarts: int
    attempts: tuple[Attempt, ...]
    cause: Failure | None
    addresses: dict[NodeId, str] = field(default_factory=dict)
    """The addresses of all nodes that ever joined, by name."""
    run_dir: str = ""
    began: str = ""
    """The wall-clock time that all times count from (ISO 8601)."""

    @property
    def ok(self) -> bool:
        """Whether all workers ended with exit code 0."""
        return self.exit_code == ExitCode.OK

    @property
    def training_seconds(self) -> float:
        """The time during which all workers of an attempt were running."""
        return sum(a.ended_at - a.running_at for a in self.attempts if a.running_at is not None)

    @property
    def lost_steps(self) -> int:
        """All steps that are known to have been done twice."""
        return sum(attempt.lost_steps or 0 for attempt in self.attempts)

    @property
    def hints(self) -> tuple[str, ...]:
        """Hints about the root cause, for a person."""
        if self.cause is None:
            return ()
        last = self.attempts[-1]
        return hints(self.cause, last.unheard, last.stacks)


@dataclass(slots=True)
class _AttemptBuilder:
    launch: Launch
    launched_at: float
    awaited: set[NodeId] = field(default_factory=set)
    running_at: float | None = None
    ended_at: float | None = None
    why_ended: str = ""
    failures: list[Failure] = field(default_factory=list)
    world_size: int = 0
    lost: list[NodeId] = field(default_factory=list)
    steps: StepHistory | None = None
    stacks: tuple[StackGroup, ...] = ()

    def attempt(self, now: float, before: StepHistory | None) -> Attempt:
        """`before`: the steps of the latest earlier attempt that made any."""
        own = self.steps
        return Attempt(
            number=self.launch.attempt,
            roster=self.launch.roster,
            launched_at=self.launched_at,
            running_at=self.running_at,
            ended_at=now if self.ended_at is None else self.ended_at,
            why_launched=self.launch.why,
            why_ended=self.why_ended,
            failures=_merge_hangs(self.failures),
            world_size=self.world_size,
            lost=tuple(self.lost),
            steps=own.last.marks if own else 0,
            first_step=own.first_step if own else None,
            last_step=own.last.high if own else None,
            lost_steps=own.lost_after(before) if own and before else None,
            pause=own.pause_after(before) if own and before else None,
            stacks=self.stacks,
        )


def result(entries: Iterable[JournalEntry], *, run_dir: str = "", began: str = "") -> RunResult:
    """Compute the result from the entries of a journal. `began` is in its first line.

    Failures that were reported too late to change a decision count here too, under their attempt: a root cause may be
    reported after its consequences.
    """
    builders: dict[int, _AttemptBuilder] = {}
    addresses: dict[NodeId, str] = {}
    nproc: dict[NodeId, int] = {}
    now = 0.0
    finish = Finish(exit_code=ExitCode.INTERNAL, why="the run did not come to an end")
    for entry in entries:
        now = now if entry.event is None else max(now, entry.event.at)
        _note_event(builders, entry, now)
        if isinstance(entry.event, NodeJoined):
            addresses[entry.event.node], nproc[entry.event.node] = entry.event.address, entry.event.nproc
        for action in entry.actions:
            match action:
                case Launch():
                    size = sum(nproc.get(node, 0) for node in action.roster)
                    builders[action.attempt] = _AttemptBuilder(
                        launch=action, launched_at=now, awaited=set(action.roster), world_size=size
                    )
                case Stop(attempt=attempt) if attempt in builders and builders[attempt].ended_at is None:
                    builders[attempt].ended_at, builders[attempt].why_ended = now, action.why
                case Finish():
                    finish = action
                case _:
                    pass
    attempts = tuple(_attempts(builders, now))
    at_fault = finish.exit_code == ExitCode.JOB_FAILED and attempts
    return RunResult(
        exit_code=finish.exit_code,
        why=finish.why,
        seconds=now,
        restarts=max(len(attempts) - 1, 0),
        attempts=attempts,
        cause=root_cause(attempts[-1].failures) if at_fault else None,
        addresses=addresses,
        run_dir=run_dir,
        began=began,
    )


def _attempts(builders: dict[int, _AttemptBuilder], now: float) -> Iterator[Attempt]:
    before: StepHistory | None = None
    for _, builder in sorted(builders.items()):
        yield builder.attempt(now, before)
        before = builder.steps or before


def _merge_hangs(failures: list[Failure]) -> tuple[Failure, ...]:
    """Merge the two failures of a worker that hung: the hang, and its end, which has the process and its files."""
    ends = {(failure.node, failure.rank): failure for failure in failures if failure.stopped}
    hung = {(failure.node, failure.rank) for failure in failures if failure.hung}
    return tuple(
        _with_end(failure, ends.get((failure.node, failure.rank))) if failure.hung else failure
        for failure in failures
        if failure.hung or (failure.node, failure.rank) not in hung
    )


def _with_end(hung: Failure, end: Failure | None) -> Failure:
    if end is None:
        return hung
    return replace(end, at=hung.at, stopped=False, hung=hung.hung, hung_at=hung.hung_at, waited=hung.waited)


def _note_event(builders: dict[int, _AttemptBuilder], entry: JournalEntry, now: float) -> None:
    match entry.event:
        case NodeLost(node=node) if builders and node in builders[max(builders)].launch.roster:
            builders[max(builders)].lost.append(node)
        case WorkersStarted(attempt=attempt, node=node) if attempt in builders:
            builder = builders[attempt]
            builder.awaited.discard(node)
            if not builder.awaited and builder.running_at is None and builder.ended_at is None:
                builder.running_at = now
        case WorkersExited(attempt=attempt) | WorkersStopped(attempt=attempt) if attempt in builders:
            builders[attempt].failures.extend(entry.event.failures)
        case WorkersHung(attempt=attempt) if attempt in builders:
            builders[attempt].failures.extend(entry.event.failures)
            builders[attempt].stacks = entry.event.groups
        case Progressed(attempt=attempt) if attempt in builders:
            steps = builders[attempt].steps
            builders[attempt].steps = StepHistory(first=steps.first if steps else entry.event, last=entry.event)


def facts(result: RunResult) -> dict[str, Any]:
    """Return the content of result.json: the fields of the result, and what its report computes from them."""
    body = asdict(result) | {"lost_steps": result.lost_steps}
    if result.cause is not None:
        failures = result.attempts[-1].failures
        followed = consequences(failures, result.cause)
        body["cause"] |= {"what": result.cause.what, "signal": result.cause.signal}
        body["alike"] = list(alike(failures, result.cause))
        body["consequences"] = [{"what": what, "ranks": list(ranks)} for what, ranks in followed]
        body["hints"] = list(result.hints)
    return body
