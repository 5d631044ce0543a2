"""What a run needs of the place where it happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.lifeline import Lifelines
from raylaunch.core.job import Job
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan


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
