"""What nodes and workers measure, and tell with their status or progress."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.newtypes import NodeId, NodeTime
from raylaunch.core.placement.devices import GpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRate:
    """How often `State` commits with `every="auto"`, and why. Measured by rank 0."""

    every: int
    """In steps."""
    commit_seconds: float
    """How long a commit takes."""
    step_seconds: float
    """How long a step takes without commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What a node holds in memory for the script, besides its workers' own memory, in bytes, and its workers' GPUs."""

    node: NodeId
    own: int
    """The buffers in which its own ranks commit their `State`."""
    copies: int
    """Copies of what ranks of other hosts have committed, or have written to RAYLAUNCH_FAST_DIR."""
    files: int = 0
    """Files that its own ranks have in RAYLAUNCH_FAST_DIR."""
    disk_seconds: float = 0.0
    """How long the slowest of its checkpoints in the durable folder took; 0: it has written none."""
    gpus: tuple[GpuUse, ...] = ()
    """Those of its workers, where the driver of NVIDIA says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTimings:
    """When a node did the parts of a restart, on its own clock."""

    ordered: NodeTime
    """The fork server received the order."""
    ended: NodeTime
    """All processes of earlier attempts were gone."""
    forked: NodeTime
    """All workers were forked."""
