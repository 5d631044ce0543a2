"""The session of a run without Ray: one machine, and agents in this process."""

from __future__ import annotations

from collections.abc import Callable

from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.fleet.local_fleet import LocalFleet
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job
from raylaunch.core.placement.plan import NodeFacts, Plan
from raylaunch.node.protocol.node_spec import AgentSpec


class LocalSession(Session):
    """A run on this machine without Ray. There is no connection to close."""

    def __init__(self) -> None:
        super().__init__(address="", local=True, brings_files=False, in_process=True)

    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """Return this machine as the only node."""
        return (local_machine.facts(job),)

    @property
    def own_address(self) -> str:
        """Return the loopback address: nobody else can reach it."""
        return local_machine.LOOPBACK

    def links(self) -> LinkServer | None:
        """Return None: agents in this process end with it."""
        return None

    def why_not_warm(self, plan: Plan) -> str:
        """Return that agents in this process end with it."""
        del plan
        return "it works on a Ray cluster only, and this run uses none"

    def fleet(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None]) -> Fleet:
        """Return agents in this process."""
        return LocalFleet(plan, spec, say, local_machine.visible_gpus())
