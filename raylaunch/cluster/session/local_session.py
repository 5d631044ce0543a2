"""The session of a run without Ray: one machine, and agents in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.fleet.agent_pool import AgentPool
from raylaunch.cluster.fleet.local_fleet import LocalFleet
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import gpus, local_machine
from raylaunch.cluster.session.session_base import Session
from raylaunch.core.job.job import Job
from raylaunch.core.placement.packing import NodeFacts
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.supervisor.forkserver_client import ForkServerClient


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

    def fleet(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None]) -> Fleet:
        """Return agents in this process."""
        if not spec.job.keep_warm:
            FORK_SERVERS.close()
        return LocalFleet(plan, spec, say, gpus.visible(), FORK_SERVERS if spec.job.keep_warm else None)


def _end(fork_servers: Sequence[ForkServerClient]) -> None:
    for fork_server in fork_servers:
        fork_server.close()


FORK_SERVERS = AgentPool(_end, lambda: None)
"""Fork servers that agents of earlier runs of this process left for its next run."""
