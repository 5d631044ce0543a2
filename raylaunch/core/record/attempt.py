"""One attempt as the result describes it, made of the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not

from raylaunch.core.failures.failure import Failure, root_cause
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.machine.events_and_actions import Launch, Progressed
from raylaunch.core.newtypes import NodeId

MOST_FAILURES = 8
MOST_STACKS = 8
"""Failures and groups of stacks that an attempt keeps once two others have followed it, the causes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """The first and the last progress report of one attempt, which may be the same."""

    first: Progressed
    last: Progressed

    @property
    def first_step(self) -> int | None:
        """The number of the first step."""
        return self.first.low

    @property
    def ended(self) -> float:
        """When the last step was done, in seconds since the run began."""
        if self.last is not self.first or self.first.rate <= 0:
            return self.last.marked
        return self.first.marked + (self.first.marks - 1) / self.first.rate

    def lost_after(self, before: StepHistory) -> int | None:
        """Return the number of steps of an earlier attempt that this one did again; None for steps without numbers."""
        if self.first_step is None or before.last.high is None:
            return None
        return max(0, before.last.high - (self.first_step - 1))

    def pause_after(self, before: StepHistory) -> float:
        """Return the seconds between the last step of an earlier attempt and the first of this one."""
        return max(0.0, self.first.marked - before.ended)


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
    omitted_failures: int = 0
    omitted_stacks: int = 0
    """How many failures and groups of stacks are left out: they are in the journal."""

    @property
    def training_seconds(self) -> float:
        """The time during which all workers were running."""
        return 0.0 if self.running_at is None else self.ended_at - self.running_at

    @property
    def unheard(self) -> tuple[int, ...]:
        """Ranks without a failure, which ended with exit code 0. Empty if nodes were lost, or failures left out."""
        if self.lost or self.omitted_failures:
            return ()
        heard = {failure.rank for failure in self.failures}
        return tuple(rank for rank in range(self.world_size) if rank not in heard)


@dataclass(slots=True)
class AttemptBuilder:
    """The events of an attempt, as far as the result needs them."""

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
    omitted_failures: int = 0
    omitted_stacks: int = 0
    is_reduced: bool = False

    def fail(self, failures: Iterable[Failure]) -> None:
        """Add failures of workers. If the attempt is reduced already, this keeps no more of them than `reduce` does."""
        self.failures.extend(failures)
        if self.is_reduced:
            self.reduce()

    def reduce(self) -> None:
        """Keep the root cause and some other failures and stacks, and count the rest: a run may have many attempts."""
        self.is_reduced = True
        self.awaited = set()
        merged = _merge_hangs(self.failures)
        first = merged if len(merged) <= MOST_FAILURES else sorted(merged, key=partial(is_not, root_cause(merged)))
        self.failures = list(first[:MOST_FAILURES])
        self.omitted_failures += len(merged) - len(self.failures)
        self.omitted_stacks += len(self.stacks[MOST_STACKS:])
        self.stacks = self.stacks[:MOST_STACKS]

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
            omitted_failures=self.omitted_failures,
            omitted_stacks=self.omitted_stacks,
        )


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
