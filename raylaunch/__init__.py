"""torchrun for a Ray cluster: one command on any node of the cluster runs an unchanged script on all of them.

The public API is what `__all__` lists; `raylaunch.worker` is the API for training scripts. The packages
follow where code runs: `cli` (the terminal), `cluster` (the driver and the agents, with Ray), `node` (the processes of
one machine), `worker` (the user's process) and `core` (decisions, without I/O). Read `core` first, then
`cluster.driver`. A command becomes a `Job`, the job a plan, the plan agents, and agents start workers. `capabilities`
has what a run can do besides, `worker_group` the ranks inside a Ray program, and `integrations` callbacks for
libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylaunch.cli.api import launch
    from raylaunch.cli.config.job_settings import JobSettings
    from raylaunch.cli.handle import Handle
    from raylaunch.cli.runs.run_summary import RunSummary
    from raylaunch.cli.spawn import SpawnContext, spawn
    from raylaunch.cli.start import attach, start
    from raylaunch.core.job.job import Job
    from raylaunch.core.record.result import JobFailedError, RunResult
    from raylaunch.errors import ClusterError, ConfigError, ExitCode, RaylaunchError, RunStoppedError
    from raylaunch.worker_group.calls import CallFailedError, GroupCall, GroupRestart, RankRestartedError, scatter
    from raylaunch.worker_group.group import WorkerGroup
    from raylaunch.worker_group.rank.messages import GroupRank
    from raylaunch.worker_group.rank_env import RankEnv, rank_env

    __version__: str

__all__ = [
    "CallFailedError",
    "ClusterError",
    "ConfigError",
    "ExitCode",
    "GroupCall",
    "GroupRank",
    "GroupRestart",
    "Handle",
    "Job",
    "JobFailedError",
    "JobSettings",
    "RankEnv",
    "RankRestartedError",
    "RaylaunchError",
    "RunResult",
    "RunStoppedError",
    "RunSummary",
    "SpawnContext",
    "WorkerGroup",
    "attach",
    "launch",
    "rank_env",
    "scatter",
    "spawn",
    "start",
]

_MODULES = {
    "launch": "raylaunch.cli.api",
    "start": "raylaunch.cli.start",
    "attach": "raylaunch.cli.start",
    "Handle": "raylaunch.cli.handle",
    "JobSettings": "raylaunch.cli.config.job_settings",
    "RunSummary": "raylaunch.cli.runs.run_summary",
    "spawn": "raylaunch.cli.spawn",
    "SpawnContext": "raylaunch.cli.spawn",
    "Job": "raylaunch.core.job.job",
    "JobFailedError": "raylaunch.core.record.result",
    "RunResult": "raylaunch.core.record.result",
    "WorkerGroup": "raylaunch.worker_group.group",
    **dict.fromkeys(
        ("CallFailedError", "GroupCall", "GroupRestart", "RankRestartedError", "scatter"),
        "raylaunch.worker_group.calls",
    ),
    "GroupRank": "raylaunch.worker_group.rank.messages",
    "RankEnv": "raylaunch.worker_group.rank_env",
    "rank_env": "raylaunch.worker_group.rank_env",
}
"""The module of each public name; the names that are not listed are in `raylaunch.errors`."""


def __getattr__(name: str) -> Any:
    # Names are imported when they are first used: workers import only raylaunch.worker, and must start fast.
    if name == "__version__":
        from raylaunch.cli.run_once import version  # noqa: PLC0415

        return version()
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(_MODULES.get(name, "raylaunch.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
