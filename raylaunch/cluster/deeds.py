"""What the seats of a run want to have done with Ray. Seats are numbers here, nodes and hosts are names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylaunch.core.layout import Bundle


@dataclass(frozen=True, slots=True)
class AskGang:
    """Reserve these seats, all or nothing."""

    bundles: Mapping[int, Bundle]


@dataclass(frozen=True, slots=True)
class Ask:
    """Reserve a seat, off these hosts."""

    seat: int
    bundle: Bundle
    off: frozenset[str]


@dataclass(frozen=True, slots=True)
class Man:
    """Start an agent at a seat; where that is not granted yet, as soon as it is."""

    seat: int
    node: str
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class Announce:
    """Say that a node is starting on a host."""

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class End:
    """End an agent. `why`: to be said of a node that was announced and will not come; else empty."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give a seat back, or do not ask for it any more."""

    seat: int


Deed = AskGang | Ask | Man | Announce | End | GiveBack
