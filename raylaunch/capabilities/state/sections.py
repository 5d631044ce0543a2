"""What the driver tells a node about copies of what it holds for the script, and what the node says of that."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.decoding import prepare
from raylaunch.core.machine.commits import CopyAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGoal:
    """What a node does in an attempt. Where it was told of none for its attempt, it makes no copies."""

    attempt: int = 0
    copies_to: CopyAddress | None = None
    """Where the node copies what its ranks commit, and their files; None: nowhere."""
    awaits_copy: bool = False
    """A node leaves after the checkpoint that is requested: what workers commit then is copied before they end."""
    peers: tuple[CopyAddress, ...] = ()
    """Where other agents have files of RAYLAUNCH_FAST_DIR, which this node may need; empty: nobody has any."""
    lost: tuple[CopyAddress, ...] = ()
    """Where others than the nodes of the world may have parts of commits: nodes that were in an earlier one, and
    subreapers of killed agents. The node asks them; it has rank 0."""
    has_survivors: bool = False
    """Workers of the attempt before may have stayed, on any node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStatus:
    """What the driver must know of what a node holds for the script."""

    at: CopyAddress | None = None
    """Where the agent gives parts of commits and files to other nodes, and takes copies of theirs; None: nowhere."""
    has_files: bool = False
    """Whether the script has files in RAYLAUNCH_FAST_DIR on the node."""
    stuck_attempt: int = 0
    """The last attempt whose survivors had no commit from which to go on, if rank 0 is on the node; 0: none."""


prepare(StateGoal, StateStatus)
