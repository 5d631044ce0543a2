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
    """The agent was killed, and its subreaper answers there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Copy the commits of this attempt that are to be kept to another host. Leads to `CopyFailed` if that fails."""

    attempt: int
    target: CopyAddress | None
    """None: it is not known yet. Commits are to be kept, and another `CopyTo` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCopies:
    """Take copies of other nodes, which have some now. Leads to `CopiesServed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free all that the node holds for the script, since no agent that follows is to have it."""


CopyOrder = CopyTo | ServeCopies | FreeMemory
"""What the driver sends to a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesServed:
    """The node can be asked for parts of commits and for files from now on, and takes copies of others."""

    host: str
    port: int
    secret: str = field(repr=False)
    uses_state: bool = True
    """The script uses `State` on the node."""
    uses_files: bool = False
    """There are files in its RAYLAUNCH_FAST_DIR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed:
    """A copy to another host, or from it, has failed. `why`: a sentence for a person. It is tried again."""

    why: str


CopyReport = CopiesServed | CopyFailed
"""What a node reports to the driver."""
