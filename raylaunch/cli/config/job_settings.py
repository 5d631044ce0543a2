"""The settings of a job as keyword arguments of `raylaunch.launch`, `start` and `spawn`, for type checkers.

A test compares the keys and types with `Job`, so that the two cannot drift apart. The meaning of each is documented
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from raylaunch.core.job.job import NodeRule, RayOptions


class NodeRuleSettings(TypedDict, total=False):
    """What one entry of `nodes` may have, as a dict instead of a `NodeRule`."""

    nproc_per_node: int | None
    env: Mapping[str, str]


class RaySettings(TypedDict, total=False):
    """What `ray` may have, as a dict instead of `RayOptions`."""

    address: str
    working_dir: str | None


class SpawnSettings(TypedDict, total=False):
    """The settings that `spawn` takes: `nprocs` and `start_method` are arguments of its own."""

    name: str | None
    run_id: str | None
    nnodes: int | str
    nproc_per_node: int | str
    nodes: Mapping[str, NodeRule | NodeRuleSettings]
    gpus_per_worker: float | Literal["auto"]
    cpus_per_worker: float
    placement: Literal["auto", "spread", "pack"]
    max_restarts: int
    preload: Sequence[str]
    backend: str | None
    env: Mapping[str, str]
    role: str
    master_addr: str | None
    master_port: int
    virtual_local_rank: bool
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None
    show: str
    progress: Literal["auto", "line", "off"]
    debug: int | None
    pty: bool
    tee: int | str
    redirects: int | str
    local_ranks_filter: str
    duplicate_stdout_filters: Sequence[str]
    duplicate_stderr_filters: Sequence[str]
    log_line_prefix_template: str | None
    log_dir: str
    log_layout: Literal["raylaunch", "torchrun"]
    report: bool
    logs_specs: Literal["default"]
    event_log_handler: Literal["null", "console"]
    signals_to_handle: Sequence[str]
    signals_to_forward: Sequence[str]
    deadline: str | None
    grace: float
    placement_timeout: float
    join_timeout: float
    multiple_of: int
    spares: int
    preemption_notices: Literal["off", "aws", "gcp", "azure"]
    exclude_after: int
    node_timeout: float
    hang_timeout: float | Literal["auto", "off"]
    last_call: float
    start_timeout: float
    shutdown_timeout: float
    state_memory: float | None
    durable: str | None
    durable_every: float
    durable_keep: int
    keep_warm: float
    ray: RayOptions | RaySettings


class JobSettings(SpawnSettings, total=False):
    """The settings that `launch` and `start` take: all of a job but its entry point."""

    nprocs: int | None
    detach: bool
    driver_timeout: float
    start_method: Literal["forkserver", "spawn"]
