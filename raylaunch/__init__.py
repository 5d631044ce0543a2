"""torchrun for a Ray cluster: one command, from anywhere in the cluster, runs an unchanged script on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylaunch.cli.api import launch
    from raylaunch.cli.spawn import SpawnContext, spawn
    from raylaunch.core.job import Job
    from raylaunch.core.result import RunResult
    from raylaunch.errors import ClusterError, ConfigError, ExitCode, JobFailedError, RaylaunchError

__all__ = [
    "ClusterError",
    "ConfigError",
    "ExitCode",
    "Job",
    "JobFailedError",
    "RaylaunchError",
    "RunResult",
    "SpawnContext",
    "launch",
    "spawn",
]

_HOME = {
    "launch": "raylaunch.cli.api",
    "spawn": "raylaunch.cli.spawn",
    "SpawnContext": "raylaunch.cli.spawn",
    "Job": "raylaunch.core.job",
    "RunResult": "raylaunch.core.result",
}


def __getattr__(name: str) -> Any:
    # Late, so that workers, which import raylaunch.worker only, pay for no more than that.
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(_HOME.get(name, "raylaunch.errors")), name)
