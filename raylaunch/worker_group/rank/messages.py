"""What the caller and a rank of its group tell each other.

The rank says `RankHello`, and gets `Begin`. It says `RankReady` when it can be called, and answers each `Call` by an
`Answer`, until it gets `End`.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.worker_group.rank.shared_parts import SharedParts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRank:
    """Where a rank of a group runs."""

    rank: int
    """RANK."""
    host: str
    """The name of its machine."""
    node: int
    """GROUP_RANK: the number of its node."""
    pid: int
    gpus: tuple[str, ...]
    """What CUDA_VISIBLE_DEVICES has in its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """A rank is there."""

    place: GroupRank
    attempt: int
    world_size: int
    has_object: bool
    """It has stayed, and has the object that it had in the attempt before."""
    ray_node: str
    """The id of its node in Ray; "": the run uses no Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Begin an attempt: make the object, unless the rank has it.

    The parts are, by `lengths`, the rank's parts of datasets, and the arguments of the class as in `Call`, unless the
    rank has its object.
    """

    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank has its object, and can be called."""

    completed: int | None
    """The steps that were done in the commit which `State` has restored; None: the object has no `state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a method. The parts are a pickle of (args, kwargs) and its buffers, then the same of values beside them."""

    number: int
    method: str
    lengths: tuple[int, ...] = ()
    """How many parts the arguments have, and then each value that is sent beside them."""
    shares_result: bool = False
    """The result goes to Ray: the answer says where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call. The parts are a pickle of what the method returned or raised, and its buffers."""

    number: int
    error: str = ""
    """`type: message` of what was raised; "": it has returned."""
    traceback: str = ""
    lost_peer: bool = False
    """The error suggests that another rank is gone."""
    shared: SharedParts | None = None
    """Where the parts are, until the next message comes. None: they are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No call follows: return."""
