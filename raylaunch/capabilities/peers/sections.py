"""The sections of the check of peers: whether the nodes of an attempt reach each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from raylaunch.core.newtypes import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where another node listens, and what it sends to whoever connects."""

    node: NodeId
    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGoal:
    """Take part in a check: first listen for other nodes, for half a minute; then connect to them."""

    check: int
    """Its number."""
    peers: tuple[PeerAddress, ...] | None = None
    """The nodes to connect to; None: listen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """How far a node is with a check."""

    check: int
    port: int = 0
    """Where it listens, at its address; 0: it cannot."""
    token: str = field(default="", repr=False)
    unreachable: tuple[tuple[NodeId, str], ...] | None = None
    """The nodes that it could not connect to, each with the reason; None: it has not tried yet."""


_GOALS, _STATUSES = msgspec.msgpack.Decoder(PeerGoal), msgspec.msgpack.Decoder(PeerStatus)


def dump(section: PeerGoal | PeerStatus) -> bytes:
    """Return a section as bytes."""
    return msgspec.msgpack.encode(section)


def load_goal(section: bytes) -> PeerGoal:
    """Read a section of a goal."""
    return _GOALS.decode(section)


def load_status(section: bytes) -> PeerStatus:
    """Read a section of a status."""
    return _STATUSES.decode(section)
