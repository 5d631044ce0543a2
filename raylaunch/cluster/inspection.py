"""Looks at a cluster and its nodes without starting anything there but a short task: for `raylaunch doctor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raylaunch.cluster.local import local_machine
from raylaunch.cluster.run import find_cluster, plan_in, plan_job
from raylaunch.core.job.job import Job
from raylaunch.core.placement.plan import Plan
from raylaunch.errors import ClusterError

Answer = TypeVar("Answer")
Look = Callable[[], Answer]
"""Collects facts on a node. It is pickled with cloudpickle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection(Generic[Answer]):
    """What was seen. Keys are addresses of nodes, in the order of Ray's list."""

    cluster: str = ""
    """The address of the cluster; "": this machine alone."""
    here: str = ""
    """The address of this machine."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """Of the nodes that have answered."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why a node gave no answer."""
    further: int = 0
    """How many nodes have the address of another one: raylets of one host, of which one is asked."""
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds by which the clock of a node is ahead of this one's, and how far this may be wrong."""
    has_token: bool = True
    """Whether the cluster is asked with a token."""
    draining: tuple[str, ...] = ()
    """Nodes that are being drained."""
    gpus: Mapping[str, float] = field(default_factory=dict)
    """How many GPUs Ray counts on each node."""
    plan: Plan | None = None
    plan_problem: str = ""
    """Why there is no plan."""


def inspect(job: Job, look: Callable[[str], Look[Answer]], seconds: float, *, with_plan: bool) -> Inspection[Answer]:
    """Call `look` on every node of the job's cluster, within `seconds` in all; without a cluster on this machine.

    `look` gets the address of this machine in the cluster, or "" without one. Raises ClusterError if there is a cluster
    that cannot be used.
    """
    address = find_cluster(job.ray)
    if address in (local_machine.NONE, local_machine.LOCAL):
        plan, problem = _plan(lambda: plan_job(job)) if with_plan else (None, "")
        here = local_machine.LOOPBACK
        return Inspection(here=here, answers={here: look("")()}, plan=plan, plan_problem=problem)
    from raylaunch.cluster.session import ray_session  # noqa: PLC0415

    with ray_session.connected(job, address) as session:
        from raylaunch.cluster.ray_api import node_tasks  # noqa: PLC0415

        plan, problem = _plan(lambda: plan_in(session, job)) if with_plan else (None, "")
        here = session.own_address
        nodes = node_tasks.nodes()
        answers, silent = node_tasks.on_each(nodes, look(here), seconds)
        return Inspection(
            cluster=session.address,
            here=here,
            answers=answers,
            silent=silent,
            further=len(nodes) - len({*nodes.values()}),
            clocks=node_tasks.clocks({node: name for node, name in nodes.items() if name in answers}, seconds),
            has_token=node_tasks.has_token(),
            draining=node_tasks.draining(),
            gpus={node.address: node.gpus for node in session.nodes(job)},
            plan=plan,
            plan_problem=problem,
        )


def _plan(make: Callable[[], Plan]) -> tuple[Plan | None, str]:
    try:
        return make(), ""
    except ClusterError as error:
        return None, str(error.message)
