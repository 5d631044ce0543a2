"""Messages between the driver and a node about its peers: whether the nodes of an attempt reach each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylaunch.core.newtypes import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenForPeers:
    """Listen for other nodes, for half a minute. Leads to `PeerListening`."""

    check: int
    """The number of the check whether nodes reach each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where another node listens, and what it sends to whoever connects."""

    node: NodeId
    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePeers:
    """Connect to other nodes. Leads to `PeersProbed`."""

    check: int
    peers: tuple[PeerAddress, ...]


PeerOrder = ListenForPeers | ProbePeers
"""What the driver sends to a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerListening:
    """The node listens for other nodes at this port of its address; 0: it cannot."""

    check: int
    port: int
    token: str = field(repr=False)
    why: str = ""
    """Why it cannot, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersProbed:
    """The node has tried to connect to other nodes."""

    check: int
    unreachable: tuple[tuple[NodeId, str], ...]
    """The nodes that it could not connect to, each with the reason."""


PeerReport = PeerListening | PeersProbed
"""What a node reports to the driver."""
