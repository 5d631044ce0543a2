"""What the workers of a job have in common, made of its settings."""

from __future__ import annotations

import os

from raylaunch.core.job.job import Job, StartMethod
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.placement.plan import Plan
from raylaunch.core.text import count
from raylaunch.errors import ConfigError
from raylaunch.node.protocol.node_spec import WorkerTemplate
from raylaunch.node.protocol.terminal_messages import TerminalSpec
from raylaunch.worker.state.checkpoints import durable_folder


def worker_template(
    job: Job, plan: Plan, run_dir: str, *, payload: bytes, terminal: TerminalSpec | None, on_cluster: bool
) -> WorkerTemplate:
    """Return what workers of all nodes have in common. `on_cluster`: whether the agents are processes of their own.

    Raises ConfigError if there is no such rank as that which gets the terminal.
    """
    if terminal is not None and terminal.rank >= plan.workers:
        msg = f"there is no rank {terminal.rank}: the job has {count(plan.workers, 'worker')}"
        raise ConfigError(msg)
    entry = job.entrypoint
    return WorkerTemplate(
        run_dir=run_dir,
        layout=job.log_layout,
        name=Redactor.of(job, os.environ).hide(job.title),
        kept=run_dir != "",
        kind="pickle" if payload else entry.kind,
        target=entry.target,
        args=tuple(entry.args),
        pass_local_rank=entry.pass_local_rank,
        numa_binding=job.numa_binding,
        cpus_per_worker=job.cpus_per_worker,
        gpus_per_worker=plan.gpus_per_worker,
        virtual_local_rank=job.virtual_local_rank,
        kwargs=dict(entry.kwargs),
        payload=payload,
        env=_durable_env(job) | dict(job.env),
        master_addr=job.master_addr or "",
        master_port=job.master_port,
        several_nodes=plan.max_nodes > 1,
        backend=job.backend or (None if plan.gpus_per_worker >= 1 else "gloo"),
        preload=job.preloaded,
        preload_auto=isinstance(job.preload, str),
        start_method=StartMethod(job.start_method),
        terminal=terminal,
        state_bytes=None if job.state_memory is None else int(job.state_memory * 2**30),
        state_secret=os.urandom(16).hex() if on_cluster else "",  # else agents end with this process, and so the run
    )


def _durable_env(job: Job) -> dict[str, str]:
    """Return the variables by which `State` knows where checkpoints are."""
    if not job.durable:
        return {}
    every, keep = f"{job.durable_every:g}", f"{job.durable_keep}"
    return {
        durable_folder.FOLDER_VARIABLE: job.durable,
        durable_folder.EVERY_VARIABLE: every,
        durable_folder.KEEP_VARIABLE: keep,
    }
