"""Calls of a group: their arguments, their futures, and the errors that they raise."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from raylaunch.core.text import named_ranks
from raylaunch.errors import RaylaunchError
from raylaunch.worker_group.lending import ObjectRef, Sent
from raylaunch.worker_group.rank import packing
from raylaunch.worker_group.rank.frames import Buffer

_LARGE = 1_000_000
"""Bytes of arrays from which on they go through Ray's object store."""


@dataclass(frozen=True, slots=True)
class Scattered:
    """An argument of which each rank gets its own part."""

    parts: tuple[Any, ...]


def scatter(parts: Sequence[Any]) -> Scattered:
    """Return an argument for a call of a `WorkerGroup`: rank 0 gets the first part, rank 1 the second.

    There must be as many parts as ranks. It may be anywhere in an argument, as in `group.call("update", {"x":
    scatter(batches)})`.
    """
    return Scattered(tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestart:
    """A restart of a group: what `on_restart` and `RankRestartedError` tell."""

    ranks: tuple[int, ...]
    """The ranks that failed; empty if nodes came or went, or a person requested the restart or other nodes."""
    why: str
    """What happened, for a person."""
    attempt: int
    """The number of the attempt that runs now."""
    world_size: int
    """The number of ranks now."""
    world_size_before: int
    """The number of ranks before."""
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
        what = f"{named_ranks(restart.ranks)} failed" if restart.ranks else "restarted"
        when = "in this call" if interrupted else "before this call, which was not begun"
        state = "the objects have no `state`, and were made anew"
        if restart.completed is not None:
            state = f"`State` was restored after {restart.completed} steps"
        super().__init__(
            f"{what} {when} ({restart.why}); all ranks run again, in attempt {restart.attempt}; {state}",
            hint="make the call again, or have it made again by `retry=True`",
        )


class CallFailedError(RaylaunchError):
    """A method raised an exception in a rank, which goes on. `__cause__` is it, if it could be pickled."""

    __module__ = "raylaunch"

    def __init__(self, message: str, *, hint: str = "", rank: int = -1) -> None:
        super().__init__(message, hint=hint)
        #: The first rank whose exception was heard of.
        self.rank = rank


class GroupCall(Future[Any]):
    """The future of a call: a `concurrent.futures.Future` that can also be awaited in asyncio.

    `result()` returns the results by rank, or the one result of a call on one rank.
    """

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in asyncio. Where the task that waits is cancelled, the call goes on."""
        return asyncio.shield(asyncio.wrap_future(self)).__await__()


def fail(future: Future[Any], error: BaseException) -> None:
    """Let a future raise this, unless it was cancelled, or has failed."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A call as the group's thread knows it."""

    future: GroupCall
    method: str
    arguments: PackedArguments
    rank: int | None
    """The only one that is called; None: all are."""
    retry: bool
    returns_ref: bool = False
    """What methods return stays in Ray."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResize:
    """A resize that waits for its turn among the calls, or goes on."""

    done: Future[None]
    min_nodes: int
    max_nodes: int
    seconds: float
    """How long the cluster may take to provide the nodes."""


class PackedArguments:
    """The arguments of a call as they are sent. Arrays are not copied: change none of them before the call is over.

    What is large goes through Ray's object store, if there is Ray: it is copied once, and once to each node.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise TypeError for what cannot be pickled."""
        #: What is sent beside the arguments: parts for the ranks, or one object of Ray's for all of them.
        self._beside: list[Scattered | ObjectRef] = []
        self._common = _packed((tuple(args), kwargs), self._identify)
        #: Of each value beside: what is sent for it, or by rank.
        self._parts = [[*map(_sent, value.parts)] if isinstance(value, Scattered) else value for value in self._beside]

    def _identify(self, obj: object) -> int | None:
        if not isinstance(obj, (Scattered, *packing.ref_types())):
            return None
        self._beside.append(obj)
        return len(self._beside) - 1

    @property
    def is_scattered(self) -> bool:
        """Whether they have a part for each rank."""
        return any(isinstance(value, Scattered) for value in self._beside)

    def check(self, world_size: int) -> None:
        """Raise ValueError unless there is a part for each rank."""
        for value in self._beside:
            if isinstance(value, Scattered) and len(value.parts) != world_size:
                msg = f"`scatter` got {len(value.parts)} parts, and the group has {world_size} ranks"
                raise ValueError(msg)

    def of(self, rank: int) -> list[Sent]:
        """Return the arguments as they are sent to a rank, and then each value beside them."""
        own = (
            parts[rank] if isinstance(value, Scattered) else parts
            for value, parts in zip(self._beside, self._parts, strict=True)
        )
        return [self._common, *own]


class Datasets:
    """Datasets of Ray Data, which are split among the ranks anew in each attempt."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        """Raise TypeError for what is no dataset."""
        for name, dataset in datasets.items():
            if not hasattr(dataset, "streaming_split"):
                msg = f"`datasets` has datasets of Ray Data, and {name!r} is of type {type(dataset).__qualname__}"
                raise TypeError(msg)
        self._datasets = dict(datasets)
        #: By name, the parts by rank. A split lasts as long as these do.
        self._shards: dict[str, Sequence[Any]] = {}

    def split(self, world_size: int) -> None:
        """End the split that there is, and make another one. Raises what Ray does."""
        self.close()
        self._shards = {
            name: dataset.streaming_split(world_size, equal=True) for name, dataset in self._datasets.items()
        }

    def of(self, rank: int) -> list[Buffer]:
        """Return a rank's parts as they are sent: each is a pickle of its own, since to unpickle it connects to Ray."""
        return packing.packed({name: packing.packed(shards[rank]) for name, shards in self._shards.items()})

    def close(self) -> None:
        """End the split."""
        self._shards = {}


def is_connected() -> bool:
    """Return whether this process is connected to Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _sent(part: Any) -> Sent:
    return part if isinstance(part, packing.ref_types()) else _packed(part, packing.refuse_ref)


def _packed(value: object, identify: Callable[[object], Any]) -> Sent:
    try:
        parts = packing.packed(value, identify)
    except Exception as error:
        msg = f"the arguments cannot be sent to the ranks: {type(error).__name__}: {error}"
        raise TypeError(msg) from error
    if sum(memoryview(part).nbytes for part in parts[1:]) < _LARGE or not is_connected():
        return parts
    # Not imported at the top: they need Ray.
    import ray  # noqa: PLC0415

    from raylaunch.worker_group.object_lender import StoredParts  # noqa: PLC0415

    return ray.put(StoredParts(bytes(parts[0]), parts[1:]))
