"""Messages between the driver and a node about copies of its ranks' commits on other hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylaunch.core.newtypes import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAddress:
    """Where an agent serves the parts of commits that it holds, and takes copies of others."""

    node: NodeId
    host: str
    port: int
    secret: str = field(repr=False)
    orphaned: bool = False
    """The agent was killed, and the state keeper answers there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Copy the commits of this attempt that are to be kept to another host. Leads to `CopyFailed` if that fails."""

    attempt: int
    target: CopyAddress


CopyOrder = CopyTo
"""What the driver sends to a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesServed:
    """The script uses `State` on the node, which can be asked for parts of commits from now on."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed:
    """A copy to another host, or from it, has failed. `why`: a sentence for a person. It is tried again."""

    why: str


CopyReport = CopiesServed | CopyFailed
"""What a node reports to the driver."""
