"""Plans a job for the nodes of a session, or for this machine where no cluster was found; and what agents are told."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.session import discovery
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.placement.plan import NodeFacts, Plan, make_plan, settled
from raylaunch.errors import ClusterError, ConfigError
from raylaunch.node.linux.working_folder import current
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder

NO_CLUSTER = "ray.address: none (no cluster is running; this machine does it alone, without Ray)"
_CLUSTER_HINT = "run it on a node of the cluster, or set RAY_ADDRESS to the cluster's `host:port`"


def plan_in(session: Session, job: Job) -> Plan:
    """Return the plan of a job for the nodes that a session has now. Raises ClusterError."""
    alone = session.in_process and job.ray.address == "auto"
    plan = plan_of(job, session.nodes(job), local=session.local, alone=alone)
    return replace(plan, cluster="" if session.local else session.address)


def plan_of(job: Job, nodes: tuple[NodeFacts, ...], *, local: bool, alone: bool) -> Plan:
    """Return the plan. `alone`: this machine stands in for a cluster that was not found.

    Raises ClusterError if the job cannot be planned, or needs a cluster.
    """
    try:
        plan = make_plan(job, nodes, local=local)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if not alone:
        return plan
    plan = replace(plan, assumed=(NO_CLUSTER, *plan.assumed))
    if plan.max_nodes == 1:
        return plan
    if why := _needs_cluster(job, plan):
        msg = f"no Ray cluster was found, and the job is for a cluster: {plan.max_nodes} nodes {why}"
        raise ClusterError(msg, hint=f"{_CLUSTER_HINT}\n{discovery.NO_CLUSTER_HINT}")
    return replace(plan, fallback=f"no Ray cluster was found: all {plan.max_nodes} nodes run on this machine")


def _needs_cluster(job: Job, plan: Plan) -> str:
    """Return why several nodes must not share this machine unless the person says so; `""`: they may."""
    if job.placement == "spread":
        return "with `placement: spread`"
    return "with GPUs" if any(bundle.gpus for bundle in plan.bundles) else ""


def refuse_hopeless(plan: Plan, session: Session) -> None:
    """Raise ClusterError for a plan that nothing could make possible."""
    if session.local and not plan.feasible:
        msg = "this machine cannot hold the job"
        raise ClusterError(msg, hint=plan.shortage)
    if plan.lacks_gpus and not session.may_grow():
        msg = "the job needs GPUs, no node of the cluster has any, and there is no autoscaler that could add one"
        raise ClusterError(msg, hint=f"{plan.shortage}\nwith `gpus_per_worker: 0` it runs on CPUs")


def working_folder() -> str:
    """Return the folder in which workers run. Raises ConfigError if it was removed."""
    try:
        return current()
    except OSError as error:
        msg = f"the working folder cannot be used: {error.strerror}"
        raise ConfigError(msg, hint="it may have been removed or moved: `cd` to a folder that exists") from None


def refuse_durable(job: Job, session: Session) -> None:
    """Raise ConfigError for a folder `durable` that cannot be used, as far as this machine can tell."""
    folder = DurableFolder.of(job.durable, {})
    if folder is None or session.brings_files:
        return
    try:
        if session.local:
            folder.check_writable()
        else:
            folder.check()
    except OSError as error:
        msg = f"checkpoints cannot be written to {folder.path}: {error.strerror}"
        raise ConfigError(msg, hint="`durable` names a folder that all nodes see, or may make") from None


def agent_spec(
    job: Job,
    plan: Plan,
    session: Session,
    run_dir: str,
    submitter_env: dict[str, str],
    links: LinkServer | None,
    *,
    payload: bytes,
) -> AgentSpec:
    """Return what all agents are told; the fleet adds the rest for each."""
    return AgentSpec(
        job=replace(settled(job, plan), name=Redactor.of(job, os.environ).hide(job.title)),
        run_dir=run_dir,
        payload=payload,
        copy_secret=os.urandom(32).hex(),
        state_secret="" if session.in_process else os.urandom(16).hex(),  # else agents end with this process
        address=local_machine.LOOPBACK if session.local else None,
        submitter_env=submitter_env,
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        cwd=None if session.brings_files else working_folder(),
        ray_address=session.address,
        link_address=links.address if links else None,
        epoch=time.time_ns(),  # no run whose agents this one may use has a higher one
    )
