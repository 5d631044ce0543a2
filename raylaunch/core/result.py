"""What came of a run: built from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raylaunch.core.actions import Finish, Launch, Stop
from raylaunch.core.course import Course
from raylaunch.core.events import (
    NodeJoined,
    NodeLost,
    Progressed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure, alike, consequences, root_cause
from raylaunch.core.hints import hints
from raylaunch.core.journal import Entry
from raylaunch.core.stacks import StackGroup
from raylaunch.errors import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One world: from the order to start it until the order to end it. Times in seconds since the run began."""

    number: int
    roster: tuple[str, ...]
    launched_at: float
    running_at: float | None
    """When all its workers were started; None if that never came."""
    ended_at: float
    why_launched: str
    why_ended: str
    failures: tuple[Failure, ...]
    world_size: int = 0
    lost: tuple[str, ...] = ()
    """Nodes of which nothing more was heard."""
    steps: int = 0
    """As many as were told of, of the worker that was furthest."""
    first_step: int | None = None
    last_step: int | None = None
    """By the script's own numbers, or its optimizer's; None where there are none."""
    lost_steps: int | None = None
    """Steps of the attempts before that were done again. None: none was before, or they have no numbers."""
    pause: float | None = None
    """Seconds since the last step of the attempts before, until all workers had done one. None: none was before."""
    stacks: tuple[StackGroup, ...] = ()
    """Where it hung: what all workers were doing, the odd ones first."""

    @property
    def unheard(self) -> tuple[int, ...]:
        """Ranks that no failure is known of: they ended with exit code 0. None, where nodes were lost."""
        if self.lost:
            return ()
        heard = {failure.rank for failure in self.failures}
        return tuple(rank for rank in range(self.world_size) if rank not in heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The whole run. `cause` is the root cause of its end, None where workers were not at fault."""

    exit_code: int
    why: str
    seconds: float
    restarts: int
    attempts: tuple[Attempt, ...]
    cause: Failure | None
    addresses: dict[str, str] = field(default_factory=dict)
    """Of all nodes that ever joined, by name."""
    run_dir: str = ""
    began: str = ""
    """The wall-clock time that all times count from, ISO 8601."""

    @property
    def ok(self) -> bool:
        """Whether all workers finished."""
        return self.exit_code == ExitCode.OK

    @property
    def training_seconds(self) -> float:
        """The time during which all workers of an attempt were up."""
        return sum(a.ended_at - a.running_at for a in self.attempts if a.running_at is not None)

    @property
    def lost_steps(self) -> int:
        """All steps that are known to have been done again."""
        return sum(attempt.lost_steps or 0 for attempt in self.attempts)

    @property
    def hints(self) -> tuple[str, ...]:
        """What a person may do about it."""
        if self.cause is None:
            return ()
        last = self.attempts[-1]
        return hints(self.cause, last.unheard, last.stacks)


@dataclass(slots=True)
class _Draft:
    launch: Launch
    launched_at: float
    awaited: set[str] = field(default_factory=set)
    running_at: float | None = None
    ended_at: float | None = None
    why_ended: str = ""
    failures: list[Failure] = field(default_factory=list)
    world_size: int = 0
    lost: list[str] = field(default_factory=list)
    course: Course | None = None
    stacks: tuple[StackGroup, ...] = ()

    def attempt(self, now: float, before: Course | None) -> Attempt:
        """`before`: of the latest attempt before that made steps."""
        own = self.course
        return Attempt(
            number=self.launch.attempt,
            roster=self.launch.roster,
            launched_at=self.launched_at,
            running_at=self.running_at,
            ended_at=now if self.ended_at is None else self.ended_at,
            why_launched=self.launch.why,
            why_ended=self.why_ended,
            failures=_told_once(self.failures),
            world_size=self.world_size,
            lost=tuple(self.lost),
            steps=own.last.marks if own else 0,
            first_step=own.first_step if own else None,
            last_step=own.last.high if own else None,
            lost_steps=own.lost_after(before) if own and before else None,
            pause=own.pause_after(before) if own and before else None,
            stacks=self.stacks,
        )


def result(entries: Iterable[Entry], *, run_dir: str = "", began: str = "") -> RunResult:
    """Read the journal. `began` is in its first line.

    Failures told too late for the machine to act on still count here, under their own attempt: a cause may be heard
    of after its consequences.
    """
    drafts: dict[int, _Draft] = {}
    addresses: dict[str, str] = {}
    nproc: dict[str, int] = {}
    now = 0.0
    finish = Finish(exit_code=ExitCode.INTERNAL, why="the run did not come to an end")
    for entry in entries:
        now = now if entry.event is None else max(now, entry.event.at)
        _note_event(drafts, entry, now)
        if isinstance(entry.event, NodeJoined):
            addresses[entry.event.node], nproc[entry.event.node] = entry.event.address, entry.event.nproc
        for action in entry.actions:
            match action:
                case Launch():
                    size = sum(nproc.get(node, 0) for node in action.roster)
                    drafts[action.attempt] = _Draft(
                        launch=action, launched_at=now, awaited=set(action.roster), world_size=size
                    )
                case Stop(attempt=attempt) if attempt in drafts and drafts[attempt].ended_at is None:
                    drafts[attempt].ended_at, drafts[attempt].why_ended = now, action.why
                case Finish():
                    finish = action
                case _:
                    pass
    attempts = tuple(_attempts(drafts, now))
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


def _attempts(drafts: dict[int, _Draft], now: float) -> Iterator[Attempt]:
    before: Course | None = None
    for _, draft in sorted(drafts.items()):
        yield draft.attempt(now, before)
        before = draft.course or before


def _told_once(failures: list[Failure]) -> tuple[Failure, ...]:
    """A worker that hung is told of again when it is ended: then come its process, and where its files are."""
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


def _note_event(drafts: dict[int, _Draft], entry: Entry, now: float) -> None:
    match entry.event:
        case NodeLost(node=node) if drafts and node in drafts[max(drafts)].launch.roster:
            drafts[max(drafts)].lost.append(node)
        case WorkersStarted(attempt=attempt, node=node) if attempt in drafts:
            draft = drafts[attempt]
            draft.awaited.discard(node)
            if not draft.awaited and draft.running_at is None and draft.ended_at is None:
                draft.running_at = now
        case WorkersExited(attempt=attempt) | WorkersStopped(attempt=attempt) if attempt in drafts:
            drafts[attempt].failures.extend(entry.event.failures)
        case WorkersHung(attempt=attempt) if attempt in drafts:
            drafts[attempt].failures.extend(entry.event.failures)
            drafts[attempt].stacks = entry.event.groups
        case Progressed(attempt=attempt) if attempt in drafts:
            course = drafts[attempt].course
            drafts[attempt].course = Course(first=course.first if course else entry.event, last=entry.event)


def facts(result: RunResult) -> dict[str, Any]:
    """The result as JSON can hold it, with what the report says of it in words."""
    body = asdict(result) | {"lost_steps": result.lost_steps}
    if result.cause is not None:
        failures = result.attempts[-1].failures
        followed = consequences(failures, result.cause)
        body["cause"] |= {"what": result.cause.what, "signal": result.cause.signal}
        body["alike"] = list(alike(failures, result.cause))
        body["consequences"] = [{"what": what, "ranks": list(ranks)} for what, ranks in followed]
        body["hints"] = list(result.hints)
    return body
