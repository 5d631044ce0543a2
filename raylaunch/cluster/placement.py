"""Room for the agents: the fewest nodes as one gang, all or nothing; each further node in a group of its own.

A pending group is also what an autoscaler sees as demand, and its becoming ready is the node's arrival.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylaunch.core.plan import Plan

_LITTLE = {"CPU": 0.001}
"""Ray knows no empty bundle."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One agent's place."""

    group: PlacementGroup
    index: int

    def options(self, plan: Plan) -> dict[str, Any]:
        """How to make an actor that sits here."""
        return {
            "num_cpus": plan.cpus,
            "num_gpus": plan.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index),
        }


class Reservation:
    """All groups of the run. Nothing of it is left after `cancel`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups: list[PlacementGroup] = []

    def gang(self) -> list[Seat]:
        """The fewest nodes worth starting with."""
        strategy = "STRICT_SPREAD" if self._plan.spread else "PACK"
        bundles = [self._bundle() for _ in range(self._plan.min_nodes)]
        group = placement_group(bundles, strategy=strategy)
        self._groups.append(group)
        return [Seat(group, index) for index in range(self._plan.min_nodes)]

    def one_more(self, taken: Iterable[str]) -> Seat:
        """One node beyond the gang; where agents must be spread, not one of those that are taken (Ray node ids)."""
        avoid = ",".join(sorted(set(taken)))
        selector = [{"ray.io/node-id": f"!in({avoid})"}] if self._plan.spread and avoid else None
        group = placement_group([self._bundle()], bundle_label_selector=selector)
        self._groups.append(group)
        return Seat(group, 0)

    def _bundle(self) -> dict[str, float]:
        return self._plan.bundle or dict(_LITTLE)

    def cancel(self) -> None:
        """Give everything back, granted or still asked for."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                remove_placement_group(group)
        self._groups.clear()
