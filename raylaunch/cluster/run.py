"""A run from end to end: connect, plan, reserve, drive, and leave nothing behind."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from raylaunch.cluster import here, signals, warm, where
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.driver import Driver
from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.lifeline import Lifelines
from raylaunch.cluster.observer import Observer
from raylaunch.cluster.run_folder import RunFolder
from raylaunch.cluster.session import Session
from raylaunch.core import result as results
from raylaunch.core import streams
from raylaunch.core.actions import Finish
from raylaunch.core.environment import submitted
from raylaunch.core.job import Job
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan, make_plan, settled
from raylaunch.core.redaction import Secrets
from raylaunch.core.result import RunResult
from raylaunch.errors import ClusterError, ConfigError, ExitCode, RaylaunchError
from raylaunch.node.settings import NodeSettings

_ALONE = "ray.address: none (no cluster is running; this machine does it alone, without Ray)"


class Watcher(Observer, Protocol):
    """An observer that is also told of the plan and of the run folder before the first event."""

    def planned(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The run begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result, and what functions returned or raised: cloudpickled, by rank."""

    result: RunResult
    values: dict[int, bytes] = field(default_factory=dict)


def plan_job(job: Job) -> Plan:
    """Who would run where. Connects to a cluster if there is one; starts nothing. Raises ClusterError."""
    with _discreet(Secrets.of(job, os.environ)):
        found = where.find(job.ray)
        if found in (here.LOCAL, here.NONE):
            return _plan(job, (here.facts(job),), local=True, alone=found == here.NONE)
        with where.connected(job) as connection:
            return _plan_now(job, connection)


@contextlib.contextmanager
def _discreet(secrets: Secrets) -> Iterator[None]:
    """No error repeats what is secret, though a worker or an address may have told it."""
    try:
        yield
    except RaylaunchError as error:
        error.message, error.hint = secrets.hide(error.message), secrets.hide(error.hint)
        error.args = (error.message,)
        raise


def _plan_now(job: Job, connection: Session) -> Plan:
    return _plan(job, connection.nodes(job), local=connection.local, alone=connection.in_process)


def _plan(job: Job, nodes: tuple[NodeFacts, ...], *, local: bool, alone: bool) -> Plan:
    try:
        plan = make_plan(job, nodes, local=local)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    return replace(plan, assumed=(_ALONE, *plan.assumed)) if alone and job.ray.address == "auto" else plan


def run_job(job: Job, job_text: str, watcher: Watcher, *, payload: bytes = b"") -> Outcome:
    """Run it. `payload`: cloudpickle of (function, args, kwargs), instead of the job's entry point.

    Raises ClusterError where the cluster cannot be reached or cannot hold the job at all, and
    InterruptedByUserError for a signal before the first worker was asked for; whatever happens to workers is in the
    outcome.
    """
    submitter_env = submitted(os.environ)  # before Ray adds to it
    secrets = Secrets.of(job, os.environ)
    _cwd()
    with _discreet(secrets), signals.handled(job) as signalled, where.connected(job) as connection:
        plan = _plan_now(job, connection)
        if connection.local and not plan.feasible:
            msg = "this machine cannot hold the job"
            raise ClusterError(msg, hint=plan.shortage)
        began, began_at = datetime.now(UTC), time.monotonic()
        run_id = job.run_id or began.astimezone().strftime("%Y-%m-%dT%H-%M-%S")
        folder = RunFolder.create(job, run_id, watcher.said)
        folder.open(settled(job, plan), job_text, plan, began.isoformat(), began_at)
        watcher.planned(job, plan, folder.where)
        if _ALONE in plan.assumed:
            watcher.said("no Ray cluster is running: this machine does it alone, without Ray")
        for warning in plan.warnings:
            watcher.said(warning)
        settings = _settings(job, plan, folder.where, run_id, payload)
        lifelines = connection.lifelines()
        job = _believing(job, connection)
        if why := warm.forbidden(job, plan, in_process=connection.in_process):
            watcher.said(f"keep_warm has no effect: {why}")
            job = replace(job, keep_warm=0.0)
        fleet = connection.fleet(plan, _told(job, connection, settings, submitter_env, lifelines), watcher.said)
        driver = Driver(settled(job, plan), run_id, fleet, folder, watcher, began_at, lifelines)
        signalled.go_to(driver.signalled)
        values: dict[int, bytes] = {}
        hopeless: ClusterError | None = None
        with contextlib.closing(lifelines) if lifelines else contextlib.nullcontext(), contextlib.closing(fleet):
            try:
                finish = driver.run()
                values = _values(fleet, driver, finish) if payload else {}
                fleet.rest()
            except ClusterError as error:  # no torch there, a port that is taken: waiting would not mend it
                hopeless = error
        found = results.result(folder.entries, run_dir=folder.where, began=began.isoformat())
        if hopeless is not None:
            found = replace(found, exit_code=hopeless.exit_code, why=hopeless.message)
        elif found.exit_code == ExitCode.UNAVAILABLE:
            found = replace(found, why=f"{found.why}\n{_shortage(job, connection, found)}")
        found = secrets.shown(found)
        folder.close(found)
        if hopeless is not None:
            raise hopeless
        return Outcome(result=found, values=values)


def _shortage(job: Job, connection: Session, found: RunResult) -> str:
    text = _plan_now(job, connection).shortage
    if any(attempt.lost for attempt in found.attempts):
        text += "\nRay may take a minute to notice that a node is gone: it may be counted here"
    return text


def _values(fleet: Fleet, driver: Driver, finish: Finish) -> dict[int, bytes]:
    """What functions returned or raised. Of a run that failed anyway, what can be had."""
    try:
        return fleet.values(driver.machine.nodes)
    except ClusterError:
        if finish.exit_code == ExitCode.OK:
            raise
        return {}


def _settings(job: Job, plan: Plan, run_dir: str, run_id: str, payload: bytes) -> NodeSettings:
    """For all nodes; each agent fills in its own name, address, environment and folder."""
    entry = job.entrypoint
    return NodeSettings(
        node="",
        address="",
        run_dir=run_dir,
        layout=job.log_layout,
        kept=run_dir != "",
        run_id=run_id,
        max_restarts=job.max_restarts,
        kind="pickle" if payload else entry.kind,
        target=entry.target,
        args=tuple(entry.args),
        pass_local_rank=entry.pass_local_rank,
        numa_binding=job.numa_binding,
        kwargs=dict(entry.kwargs),
        payload=payload,
        env=dict(job.env),
        master_addr=job.master_addr or "",
        master_port=job.master_port,
        several_nodes=plan.max_nodes > 1,
        cwd="",
        backend=job.backend,
        preload=job.preloaded,
        learn=isinstance(job.preload, str),
        start_method=job.start_method,
    )


def _cwd() -> str:
    """Where workers are to run. Raises ConfigError."""
    try:
        return os.getcwd()
    except OSError as error:
        msg = f"the working folder cannot be used: {error.strerror}"
        raise ConfigError(msg, hint="it was removed or moved, perhaps: `cd` to one that is there") from None


def _believing(job: Job, connection: Session) -> Job:
    """Agents in this process cannot be lost without it."""
    return replace(job, node_timeout=math.inf) if connection.in_process else job


def _told(
    job: Job,
    connection: Session,
    settings: NodeSettings,
    submitter_env: dict[str, str],
    lifelines: Lifelines | None,
) -> AgentSettings:
    return AgentSettings(
        settings=settings,
        address=here.LOOPBACK if connection.local else None,
        nproc=0,
        rules=job.nodes,
        submitter_env=submitter_env,
        cwd=None if connection.brings_files else _cwd(),
        ray_address=connection.address,
        view=streams.view(job),
        node_timeout=job.node_timeout,
        anchor=lifelines.anchor if lifelines else None,
        keep_warm=job.keep_warm,
    )
