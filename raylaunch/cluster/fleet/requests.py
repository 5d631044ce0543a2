"""Requests of the allocator to a fleet: what to reserve, start, stop and release.

Slots are numbers; nodes and hosts are names. `RayFleet` carries them out with Ray, `LocalFleet` on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylaunch.core.placement.packing import Bundle


@dataclass(frozen=True, slots=True)
class ReserveGang:
    """Reserve resources for these slots, all or nothing. `bundles`: by slot."""

    bundles: Mapping[int, Bundle]


@dataclass(frozen=True, slots=True)
class ReserveSlot:
    """Reserve resources for one slot, on none of the hosts in `avoid`."""

    slot: int
    bundle: Bundle
    avoid: frozenset[str]


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the agent of `node` in a slot, as soon as the slot is granted."""

    slot: int
    node: str
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class AnnounceNode:
    """Tell the driver that `node` is starting on `host`."""

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class StopAgent:
    """Stop the agent of `node`. `why`: what to tell the driver if the node was announced; else `""`."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Release the resources of a slot, or withdraw the reservation if it is still pending."""

    slot: int


Request = ReserveGang | ReserveSlot | StartAgent | AnnounceNode | StopAgent | ReleaseSlot
