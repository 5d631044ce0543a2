"""Where a run takes place: a Ray cluster, or this machine alone. No Ray is imported to find out that there is none."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raylaunch.cluster import here
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.lifeline import Lifelines
from raylaunch.core.job import Job, RayOptions
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan

LOCAL = "local"
"""Instead of an address: a Ray is to be started in this process."""
NONE = here.NONE
"""Instead of an address: this machine, without Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(ABC):
    """Where the run takes place, and how agents are started there."""

    address: str
    """Where scripts find Ray; `""`: there is none."""
    local: bool
    """This machine is all there is, for this run alone."""
    brings_files: bool
    """Ray copies the working folder to the nodes (`ray job submit --working-dir`, or `ray.working_dir`)."""
    in_process: bool = False
    """Agents live in this process, and end with it."""

    @abstractmethod
    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """What there is, with what is free right now."""

    @abstractmethod
    def lifelines(self) -> Lifelines | None:
        """By which the agents and this process know that the other is there; None: they need none."""

    @abstractmethod
    def fleet(self, plan: Plan, told: AgentSettings, say: Callable[[str], None]) -> Fleet:
        """The agents of a run."""


def find(options: RayOptions) -> str:
    """The address of the cluster to connect to, `LOCAL` or `NONE`. Raises ClusterError within seconds."""
    if here.is_alone(options, os.environ):
        return NONE
    from raylaunch.cluster import ray_session  # noqa: PLC0415

    return ray_session.find(options)


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Session]:
    """For the time of the run. Raises ClusterError within seconds."""
    address = find(job.ray)
    if address == NONE:
        from raylaunch.cluster.local_session import LocalSession  # noqa: PLC0415

        yield LocalSession()
        return
    from raylaunch.cluster import ray_session  # noqa: PLC0415

    with ray_session.connected(job, address) as session:
        yield session
