"""The interface of a session: what a run needs of the cluster, or of the single machine, where it takes place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.core.job.job import Job
from raylaunch.core.placement.plan import NodeFacts, Plan
from raylaunch.node.protocol.node_spec import AgentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(ABC):
    """A connection to the place of a run: a Ray cluster (`RaySession`) or this machine without Ray (`LocalSession`)."""

    address: str
    """The address by which scripts find Ray; `""`: there is none."""
    local: bool
    """This machine is the only node, and the run has it for itself."""
    brings_files: bool
    """Ray copies the working folder to the nodes (`ray job submit --working-dir`, or `ray.working_dir`)."""
    in_process: bool = False
    """Agents run in this process, and end with it."""
    notes: tuple[str, ...] = ()
    """What this version of Ray cannot do, in sentences for a person."""

    @abstractmethod
    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """Return the nodes, with their resources that are free right now."""

    @property
    @abstractmethod
    def own_address(self) -> str:
        """The address of this machine at which agents, and commands on other machines, reach this process."""

    def may_grow(self) -> bool:
        """Return whether an autoscaler may add nodes; True if that is not known."""
        return False

    @abstractmethod
    def links(self) -> LinkServer | None:
        """Return a new server for the agents' links to this process; None: they need none, or it cannot listen."""

    @abstractmethod
    def why_not_warm(self, plan: Plan) -> str:
        """Return why no agent can be left to the next run (`keep_warm`); "": there is no reason."""

    @abstractmethod
    def fleet(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None]) -> Fleet:
        """Return the agents of a run, none of which is started yet. `say` takes a line for a person."""
