"""The result of a run, computed from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from raylaunch.core.failures.failure import Failure, alike, consequences, root_cause
from raylaunch.core.failures.hints import hints
from raylaunch.core.machine.events_and_actions import (
    DriverReplaced,
    Event,
    Finish,
    Launch,
    NodeJoined,
    NodeLost,
    Progressed,
    Release,
    Stop,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.newtypes import NodeId
from raylaunch.core.record.attempt import Attempt, AttemptBuilder, StepHistory
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.run_layout import EVENTS
from raylaunch.errors import JOB_FAILURES, ExitCode, RaylaunchError, resume

FIRST_ATTEMPTS, LAST_ATTEMPTS = 20, 80
"""How many of the first and of the last attempts a result describes. It sums up the attempts between them."""
MOST_NODES = 200
"""Addresses that a result holds before it drops any. It always keeps the addresses of nodes in its attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OmittedAttempts:
    """The sum of attempts that are not described, since there are too many."""

    first: int
    last: int
    """The numbers of the first and the last one."""
    training_seconds: float = 0.0
    lost_steps: int = 0
    where: str = EVENTS
    """The file of the run folder that has all of them."""

    @property
    def count(self) -> int:
        """The number of attempts from `first` to `last`."""
        return self.last - self.first + 1


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
    """The addresses of the nodes that joined, by name. If very many did, only of those in `attempts` and the last."""
    run_dir: str = ""
    began: str = ""
    """The wall-clock time that all times count from (ISO 8601)."""
    omitted: OmittedAttempts | None = None
    """Attempts that are not in `attempts`; None: there are none."""
    takeovers: int = 0
    """How often another driver took over."""

    @property
    def ok(self) -> bool:
        """Whether all workers ended with exit code 0."""
        return self.exit_code == ExitCode.OK

    @property
    def training_seconds(self) -> float:
        """The time during which all workers of an attempt were running."""
        omitted = self.omitted.training_seconds if self.omitted is not None else 0.0
        return omitted + sum(attempt.training_seconds for attempt in self.attempts)

    @property
    def lost_steps(self) -> int:
        """All steps that are known to have been done twice."""
        omitted = self.omitted.lost_steps if self.omitted is not None else 0
        return omitted + sum(attempt.lost_steps or 0 for attempt in self.attempts)

    @property
    def hints(self) -> tuple[str, ...]:
        """Hints about the root cause, for a person."""
        if self.cause is None:
            return ()
        last = self.attempts[-1]
        return hints(self.cause, last.unheard, last.stacks)


class JobFailedError(RaylaunchError):
    """Workers failed, and either no restarts are left or a restart would not help."""

    __module__ = "raylaunch"

    def __init__(self, message: str, *, hint: str = "", result: RunResult) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = result.exit_code
        #: The whole result; `result.cause` is the failure of the worker that failed first.
        self.result = result

    @property
    def rank(self) -> int | None:
        """The rank that failed first; None if no worker's failure ended the run."""
        return self.result.cause.rank if self.result.cause is not None else None

    @property
    def node(self) -> NodeId | None:
        """The node of that rank; its address is `result.addresses[node]`."""
        return self.result.cause.node if self.result.cause is not None else None

    @property
    def run_dir(self) -> str:
        """The path of the run folder; `""` if no files are kept."""
        return self.result.run_dir


class ResultBuilder:
    """Computes the result of a run from the entries of its journal, one after the other, with limited memory.

    Failures that were reported too late to change a decision count too, under their attempt: a root cause may be
    reported after its consequences.
    """

    def __init__(self) -> None:
        #: The first and the last attempts, by number and in its order.
        self._builders: dict[int, AttemptBuilder] = {}
        self._omitted: OmittedAttempts | None = None
        #: The steps of the latest omitted attempt that made any, or of one before the first omitted one.
        self._omitted_steps: StepHistory | None = None
        self._addresses: dict[NodeId, str] = {}
        #: Workers by node, of nodes that joined and were neither lost nor released.
        self._nproc: dict[NodeId, int] = {}
        self._forget_at = MOST_NODES
        self._now = 0.0
        self._takeovers = 0
        self._finish = Finish(exit_code=ExitCode.INTERNAL, why="the run did not come to an end")

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        if entry.event is not None:
            self._now = max(self._now, entry.event.at)
            self._note_nodes(entry.event)
            self._note_event(entry.event)
        for action in entry.actions:
            match action:
                case Launch():
                    self._begin_attempt(action)
                case Stop(attempt=attempt) if attempt in self._builders and self._builders[attempt].ended_at is None:
                    self._builders[attempt].ended_at, self._builders[attempt].why_ended = self._now, action.why
                case Release(node=node):
                    self._nproc.pop(node, None)
                case Finish():
                    self._finish = action
                case _:
                    pass

    def _note_nodes(self, event: Event) -> None:
        match event:
            case NodeJoined(node=node):
                self._addresses[node], self._nproc[node] = event.address, event.nproc
                if len(self._addresses) >= self._forget_at:
                    self._forget_nodes()
            case NodeLost(node=node):
                self._nproc.pop(node, None)
                latest = self._builders[max(self._builders)] if self._builders else None
                if latest is not None and node in latest.launch.roster:
                    latest.lost.append(node)
            case _:
                pass

    def _forget_nodes(self) -> None:
        """Forget the addresses of nodes that are neither there nor in an attempt of the result."""
        named = self._nproc.keys() | {node for builder in self._builders.values() for node in builder.launch.roster}
        self._addresses = {node: address for node, address in self._addresses.items() if node in named}
        self._forget_at = max(MOST_NODES, 2 * len(named))

    def _note_event(self, event: Event) -> None:
        match event:
            case WorkersStarted(attempt=attempt, node=node) if attempt in self._builders:
                builder = self._builders[attempt]
                builder.awaited.discard(node)
                if not builder.awaited and builder.running_at is None and builder.ended_at is None:
                    builder.running_at = self._now
            case WorkersExited(attempt=attempt) | WorkersStopped(attempt=attempt) if attempt in self._builders:
                self._builders[attempt].fail(event.failures)
            case WorkersHung(attempt=attempt) if attempt in self._builders:
                self._builders[attempt].stacks = event.groups
                self._builders[attempt].fail(event.failures)
            case Progressed(attempt=attempt) if attempt in self._builders:
                steps = self._builders[attempt].steps
                self._builders[attempt].steps = StepHistory(first=steps.first if steps else event, last=event)
            case DriverReplaced():
                self._takeovers += 1
            case _:
                pass

    def _begin_attempt(self, launch: Launch) -> None:
        size = sum(self._nproc.get(node, 0) for node in launch.roster)
        self._builders[launch.attempt] = AttemptBuilder(
            launch=launch, launched_at=self._now, awaited=set(launch.roster), world_size=size
        )
        numbers = [*self._builders]
        for number in numbers[-3:-2]:
            self._builders[number].reduce()
        if len(numbers) > FIRST_ATTEMPTS + LAST_ATTEMPTS:
            self._omit(numbers[FIRST_ATTEMPTS])

    def _omit(self, number: int) -> None:
        """Only count this attempt from now on."""
        builder = self._builders.pop(number)
        if self._omitted is None:
            first = [earlier.steps for earlier in self._builders.values() if earlier.launch.attempt < number]
            self._omitted_steps = next((steps for steps in reversed(first) if steps is not None), None)
        attempt = builder.attempt(self._now, self._omitted_steps)
        self._omitted_steps = builder.steps or self._omitted_steps
        before = self._omitted or OmittedAttempts(first=number, last=number)
        self._omitted = OmittedAttempts(
            first=before.first,
            last=number,
            training_seconds=before.training_seconds + attempt.training_seconds,
            lost_steps=before.lost_steps + (attempt.lost_steps or 0),
        )

    def _attempts(self) -> Iterator[Attempt]:
        before: StepHistory | None = None
        for number, builder in self._builders.items():
            if self._omitted is not None and number == self._omitted.last + 1:
                before = self._omitted_steps
            yield builder.attempt(self._now, before)
            before = builder.steps or before

    def result(self, *, run_dir: str = "", began: str = "") -> RunResult:
        """Return the result as far as the entries tell it. `began` is in the journal's first line."""
        attempts = tuple(self._attempts())
        at_fault = self._finish.exit_code in JOB_FAILURES and attempts
        count = len(attempts) + (self._omitted.count if self._omitted is not None else 0)
        return RunResult(
            exit_code=self._finish.exit_code,
            why=self._finish.why,
            seconds=self._now,
            restarts=max(count - 1, 0),
            attempts=attempts,
            cause=root_cause(attempts[-1].failures) if at_fault else None,
            addresses=dict(self._addresses),
            run_dir=run_dir,
            began=began,
            omitted=self._omitted,
            takeovers=self._takeovers,
        )


def result(entries: Iterable[JournalEntry], *, run_dir: str = "", began: str = "") -> RunResult:
    """Compute the result from all entries of a journal. `began` is in its first line."""
    builder = ResultBuilder()
    for entry in entries:
        builder.add(entry)
    return builder.result(run_dir=run_dir, began=began)


def facts(result: RunResult) -> dict[str, Any]:
    """Return the content of result.json: the fields of the result, and what its report computes from them."""
    body = asdict(result) | {"resume": resume(result.exit_code), "lost_steps": result.lost_steps}
    if result.cause is not None:
        failures = result.attempts[-1].failures
        followed = consequences(failures, result.cause)
        body["cause"] |= {"what": result.cause.what, "signal": result.cause.signal}
        body["alike"] = list(alike(failures, result.cause))
        body["consequences"] = [{"what": what, "ranks": list(ranks)} for what, ranks in followed]
        body["hints"] = list(result.hints)
    return body
