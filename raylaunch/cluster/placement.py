"""Room for the agents: the fewest nodes as one gang, all or nothing; each further node in a group of its own.

A pending group is also what an autoscaler sees as demand, and its becoming ready is the node's arrival.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylaunch.core.layout import Bundle
from raylaunch.core.plan import Plan

_LITTLE = {"CPU": 0.001}
"""Ray knows no empty bundle."""

_NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One agent's place."""

    group: PlacementGroup
    index: int
    bundle: Bundle

    def options(self) -> dict[str, Any]:
        """How to make an actor that sits here."""
        return {
            "num_cpus": self.bundle.cpus,
            "num_gpus": self.bundle.gpus,
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
        return self._reserve(self._plan.bundles[: self._plan.min_nodes], (), strategy)

    def one_more(self, bundle: Bundle, taken: Iterable[str]) -> Seat:
        """One node beyond the gang; where agents must be spread, not one of those that are taken (Ray node ids)."""
        (seat,) = self._reserve((bundle,), taken if self._plan.spread else (), "PACK")
        return seat

    def _reserve(self, bundles: Sequence[Bundle], taken: Iterable[str], strategy: str) -> list[Seat]:
        """Nodes are excluded rather than named: a node that comes later is as good as the one it replaces."""
        excluded = [",".join(sorted({*bundle.avoid, *taken})) for bundle in bundles]
        selectors = [{_NODE_ID: f"!in({ids})"} if ids else {} for ids in excluded]
        group = placement_group(
            [bundle.resources or dict(_LITTLE) for bundle in bundles],
            strategy=strategy,
            bundle_label_selector=selectors if any(selectors) else None,
        )
        self._groups.append(group)
        return [Seat(group, index, bundle) for index, bundle in enumerate(bundles)]

    def cancel(self) -> None:
        """Give everything back, granted or still asked for."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                remove_placement_group(group)
        self._groups.clear()
