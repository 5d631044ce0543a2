"""A run without a cluster: nothing to connect to, and agents that need none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raylaunch.cluster import gpus, here
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.lifeline import Lifelines
from raylaunch.cluster.local_fleet import LocalFleet
from raylaunch.cluster.session import Session
from raylaunch.cluster.warm import Pool
from raylaunch.core.job import Job
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan
from raylaunch.node.hearth import Hearth


class LocalSession(Session):
    """Nothing is connected to, so there is nothing to end."""

    def __init__(self) -> None:
        super().__init__(address="", local=True, brings_files=False, in_process=True)

    def nodes(self, job: Job) -> tuple[NodeFacts, ...]:
        """The one there is."""
        return (here.facts(job),)

    def lifelines(self) -> Lifelines | None:
        """Agents end with this process, whose part they are."""
        return None

    def fleet(self, plan: Plan, told: AgentSettings, say: Callable[[str], None]) -> Fleet:
        """Agents in this process."""
        if not told.keep_warm:
            HEARTHS.close()
        return LocalFleet(plan, told, say, gpus.visible(), HEARTHS if told.keep_warm else None)


def _end(hearths: Sequence[Hearth]) -> None:
    for hearth in hearths:
        hearth.close()


HEARTHS = Pool(_end, lambda: None)
"""What agents of runs of this process have left for its next run."""
