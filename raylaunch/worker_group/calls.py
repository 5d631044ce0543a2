"""Calls of a group: their arguments, their futures, and the errors that they raise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raylaunch.core.text import spans
from raylaunch.errors import RaylaunchError
from raylaunch.worker_group.rank import packing
from raylaunch.worker_group.rank.frames import Buffer


@dataclass(frozen=True, slots=True)
class Scattered:
    """An argument of which each rank gets its own part."""

    parts: tuple[Any, ...]


def scatter(parts: Sequence[Any]) -> Scattered:
    """Return an argument for a call of a `WorkerGroup` of which rank 0 gets the first part, rank 1 the second.

    There must be as many parts as ranks. It may be anywhere in an argument, as in `group.call("update", {"x":
    scatter(batches)})`.
    """
    return Scattered(tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestart:
    """A restart of a group: what `on_restart` and `RankRestartedError` tell."""

    ranks: tuple[int, ...]
    """The ranks that failed; empty if nodes came or went, or a person requested the restart."""
    why: str
    """What happened, for a person."""
    attempt: int
    """The number of the attempt that runs now."""
    completed: int | None
    """The steps that were done in the commit which `State` has restored; None: the objects have no `state`."""


class RankRestartedError(RaylaunchError):
    """Ranks of a group failed, and the group is whole again. The call was not carried out, or not by all ranks."""

    __module__ = "raylaunch"

    def __init__(self, restart: GroupRestart, *, interrupted: bool = True) -> None:
        #: What happened.
        self.restart = restart
        #: False: it happened before this call, of which nothing was carried out.
        self.interrupted = interrupted
        what = f"rank{'s' * (len(restart.ranks) > 1)} {spans(restart.ranks)} failed" if restart.ranks else "restarted"
        when = "in this call" if interrupted else "before this call, which was not begun"
        state = "the objects have no `state`, and were made anew"
        if restart.completed is not None:
            state = f"`State` was restored after {restart.completed} steps"
        super().__init__(
            f"{what} {when} ({restart.why}); all ranks run again, in attempt {restart.attempt}; {state}",
            hint="make the call again, or have it made again by `retry=True`",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restarted, (self.restart, self.interrupted)


def _restarted(restart: GroupRestart, interrupted: bool) -> RankRestartedError:
    return RankRestartedError(restart, interrupted=interrupted)


class CallFailedError(RaylaunchError):
    """A method raised an exception in a rank, which goes on. `__cause__` is that exception, if it could be pickled."""

    __module__ = "raylaunch"

    def __init__(self, message: str, *, hint: str = "", rank: int = -1) -> None:
        super().__init__(message, hint=hint)
        #: The first rank whose exception was heard of.
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return _call_failed, (self.message, self.hint, self.rank)


def _call_failed(message: str, hint: str, rank: int) -> CallFailedError:
    return CallFailedError(message, hint=hint, rank=rank)


class GroupCall(Future[Any]):
    """A call that goes on. It is a `concurrent.futures.Future`, and can be awaited in asyncio.

    `result()` returns what the methods returned, by rank; of a call of one rank, what that returned.
    """

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in asyncio. Where the task that waits is cancelled, the call goes on."""
        return asyncio.shield(asyncio.wrap_future(self)).__await__()


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A call as the group's thread knows it."""

    future: GroupCall
    method: str
    arguments: PackedArguments
    rank: int | None
    """The only one that is called; None: all are."""
    retry: bool
    is_begun: bool = False
    number: int = 0
    """Which sending of a call it is: each has another one."""
    values: dict[int, Any] = field(default_factory=dict)
    """What ranks have returned."""

    def check(self, world_size: int) -> None:
        """Raise ValueError if a group of this size cannot carry it out."""
        self.arguments.check(world_size)
        if self.rank is not None and not 0 <= self.rank < world_size:
            msg = f"there is no rank {self.rank}: the group has {world_size}"
            raise ValueError(msg)


class PackedArguments:
    """The arguments of a call as they are sent. Arrays are not copied: change none of them before the call is over."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises TypeError where something cannot be pickled."""
        self._scattered: list[Scattered] = []
        try:
            self._common = packing.packed((tuple(args), kwargs), self._identify)
            self._parts = [[packing.packed(part) for part in scattered.parts] for scattered in self._scattered]
        except Exception as error:
            msg = f"the arguments cannot be sent to the ranks: {type(error).__name__}: {error}"
            raise TypeError(msg) from error

    def _identify(self, obj: object) -> int | None:
        if not isinstance(obj, Scattered):
            return None
        self._scattered.append(obj)
        return len(self._scattered) - 1

    def check(self, world_size: int) -> None:
        """Raise ValueError unless there is a part for each rank."""
        if wrong := {len(scattered.parts) for scattered in self._scattered} - {world_size}:
            msg = f"`scatter` got {wrong.pop()} parts, and the group has {world_size} ranks"
            raise ValueError(msg)

    def of(self, rank: int) -> tuple[tuple[int, ...], list[Buffer]]:
        """Return how many parts each value has for a rank, and the parts."""
        values = [self._common, *(parts[rank] for parts in self._parts)]
        return tuple(map(len, values)), [*itertools.chain.from_iterable(values)]
