"""Room for the agents: the fewest nodes as one gang, all or nothing; each further node in a group of its own.

A pending group is also what an autoscaler sees as demand, and its becoming ready is the node's arrival. Ray's second
autoscaler also sees which hosts a group is kept off; its first one takes it to fit wherever there is room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylaunch.core.layout import Bundle

_LITTLE = {"CPU": 0.001}
"""Ray knows no empty bundle."""

_NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


class Reservation:
    """All groups of the run, by the numbers of the seats in them. Nothing of it is left after `cancel`."""

    def __init__(self, *, spread: bool) -> None:
        self._strategy = "STRICT_SPREAD" if spread else "PACK"
        self._groups: dict[int, tuple[PlacementGroup, int]] = {}
        self._first = 0

    def gang(self, bundles: Mapping[int, Bundle]) -> None:
        """The fewest nodes worth starting with."""
        self._reserve({seat: (bundle, frozenset(bundle.avoid)) for seat, bundle in bundles.items()})
        self._first = next(iter(bundles))

    def one(self, seat: int, bundle: Bundle, off: frozenset[str]) -> None:
        """One node beyond the gang, off these hosts (Ray's node ids)."""
        self._reserve({seat: (bundle, off)})

    def _reserve(self, asked: Mapping[int, tuple[Bundle, frozenset[str]]]) -> None:
        """Hosts are excluded rather than named: one that comes later is as good as the one it replaces.

        Once for each seat: whoever had no answer may ask again.
        """
        if asked.keys() <= self._groups.keys():
            return
        selectors = [{_NODE_ID: f"!in({','.join(sorted(off))})"} if off else {} for _, off in asked.values()]
        group = placement_group(
            [bundle.resources or dict(_LITTLE) for bundle, _ in asked.values()],
            strategy=self._strategy if len(asked) > 1 else "PACK",
            bundle_label_selector=selectors if any(selectors) else None,
        )
        self._groups.update({seat: (group, index) for index, seat in enumerate(asked)})

    def options(self, seat: int, bundle: Bundle) -> dict[str, Any]:
        """How to make an actor that sits there."""
        group, index = self._groups[seat]
        return {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
        }

    def when_granted(self, seat: int, call: Callable[[], None]) -> None:
        """Call once, from one of Ray's threads, when the seat's group is there; never, if it is given back before."""
        group, _ = self._groups[seat]
        group.ready().future().add_done_callback(lambda future: None if future.exception() else call())

    def hosts(self, seat: int) -> dict[int, str]:
        """Where all seats of the seat's group are; nothing where it was given back, `""` where Ray is at it."""
        if seat not in self._groups:
            return {}
        group, _ = self._groups[seat]
        found: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return {other: found.get(index, "") for other, (its, index) in self._groups.items() if its == group}

    def gang_hosts(self) -> dict[int, str]:
        """Where the seats of the gang are by now."""
        return self.hosts(self._first)

    def give_back(self, seat: int) -> None:
        """Give up a seat, granted or still asked for, and with it all that are in its group."""
        if seat in self._groups:
            group, _ = self._groups[seat]
            remove_placement_group(group)
            self._groups = {other: its for other, its in self._groups.items() if its[0] != group}

    def cancel(self) -> None:
        """Give everything back, granted or still asked for."""
        for group in {group for group, _ in self._groups.values()}:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                remove_placement_group(group)
        self._groups.clear()
