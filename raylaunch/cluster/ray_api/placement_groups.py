"""Placement groups for the agents: one for the gang, which Ray grants all or nothing, and one for each further slot.

An autoscaler sees a pending group as demand. Ray's second autoscaler also sees which hosts a group excludes; the first
one takes the group to fit wherever resources are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raylaunch.cluster import named_resources, ray_internals
from raylaunch.cluster.agent.lease import FIRST_CALL_SECONDS, end_this_process
from raylaunch.cluster.registry_key import NAMESPACE
from raylaunch.core.newtypes import NO_HOST, HostId
from raylaunch.core.placement.plan import Bundle, NodeFacts

_ALMOST_NOTHING = {"CPU": 0.001}
"""For agents that need no resources: Ray has no empty bundles."""

_NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


class Reservations(Protocol):
    """Where the agents of a run may start, by the numbers of their slots. `PlacementGroups` says what each does."""

    def reserve_gang(self, bundles: Mapping[int, Bundle]) -> None: ...
    def reserve(self, slot: int, bundle: Bundle, avoid: frozenset[HostId]) -> None: ...
    def options(self, slot: int, bundle: Bundle) -> dict[str, Any]: ...
    def when_granted(self, slot: int, call: Callable[[], None]) -> None: ...
    def hosts(self, slot: int) -> dict[int, HostId]: ...
    def gang_hosts(self) -> dict[int, HostId]: ...
    def release(self, slot: int) -> None: ...
    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GivenGroup:
    """A placement group of the caller's, or a part of it. It is granted, and stays as it is."""

    group: PlacementGroup
    places: tuple[tuple[int, HostId], ...]
    """The index and the host of each bundle, in the order in which they are used."""

    def facts(self, nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
        """Return the nodes that have bundles, with what these reserve in place of all that is free."""
        found = []
        for node in nodes:
            own = [self.group.bundle_specs[index] for index, host in self.places if host == node.node_id]
            cpus, gpus = (sum(bundle.get(name, 0.0) for bundle in own) for name in ("CPU", "GPU"))
            if own:
                found.append(replace(node, cpus=cpus, gpus=gpus, free_cpus=cpus, free_gpus=gpus))
        return tuple(found)


class GivenBundles:
    """The reservations of a run in a group of the caller's: each slot has a bundle. No bundle is ever removed."""

    def __init__(self, given: GivenGroup) -> None:
        self._given = given
        self._free = [*given.places]
        #: By slot: the index and the host of its bundle.
        self._taken: dict[int, tuple[int, HostId]] = {}

    def reserve_gang(self, bundles: Mapping[int, Bundle]) -> None:
        """Give each of these slots a bundle."""
        for slot, bundle in bundles.items():
            self.reserve(slot, bundle, frozenset())

    def reserve(self, slot: int, bundle: Bundle, avoid: frozenset[HostId]) -> None:
        """Give the slot a bundle, if one is free; else it is never granted."""
        del bundle
        usable = [place for place in self._free if place[1] not in avoid]
        if slot not in self._taken and usable:
            self._taken[slot] = usable[0]
            self._free.remove(usable[0])

    def options(self, slot: int, bundle: Bundle) -> dict[str, Any]:
        """Return the options for an actor that runs in the slot's bundle."""
        strategy = PlacementGroupSchedulingStrategy(self._given.group, self._taken[slot][0])
        return {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "scheduling_strategy": strategy}

    def when_granted(self, slot: int, call: Callable[[], None]) -> None:
        """Call at once: the group is granted."""
        if slot in self._taken:
            call()

    def hosts(self, slot: int) -> dict[int, HostId]:
        """Return the host of the slot."""
        return {slot: self._taken[slot][1]} if slot in self._taken else {}

    def gang_hosts(self) -> dict[int, HostId]:
        """Return the hosts of all slots."""
        return {slot: host for slot, (_, host) in self._taken.items()}

    def release(self, slot: int) -> None:
        """Let another slot have the bundle."""
        if (place := self._taken.pop(slot, None)) is not None:
            self._free.append(place)

    def cancel(self) -> None:
        """Do nothing: the group is the caller's."""


class PlacementGroups:
    """All placement groups of a run, by the numbers of the slots in them. `cancel` removes them all."""

    def __init__(self, *, spread: bool, token: str = "") -> None:
        """`token`: of a detached run, whose groups outlive the process that reserves them; `""`: they end with it."""
        self._token = token
        self._strategy = "STRICT_SPREAD" if spread else "PACK"
        #: By slot: its group, and the index of its bundle there.
        self._groups: dict[int, tuple[PlacementGroup, int]] = {}
        self._first_of_gang = 0
        #: Creates the groups, and ends with this process, if that is an actor or a task; None: it has created none.
        self._creator: Any = None

    def reserve_gang(self, bundles: Mapping[int, Bundle]) -> None:
        """Request one group for these slots. `bundles`: by slot."""
        self._reserve({slot: (bundle, frozenset(bundle.avoid)) for slot, bundle in bundles.items()})
        self._first_of_gang = next(iter(bundles))

    def reserve(self, slot: int, bundle: Bundle, avoid: frozenset[HostId]) -> None:
        """Request a group for one slot, on none of the hosts in `avoid` (Ray's node ids)."""
        self._reserve({slot: (bundle, avoid)})

    def _reserve(self, slots: Mapping[int, tuple[Bundle, frozenset[HostId]]]) -> None:
        """Request a group, unless the slots have one: a call that failed for want of an answer may be repeated.

        Hosts are excluded, not named, so that a host that is added later can be used as well. A Ray that cannot exclude
        any is asked for a host that is used little; the allocator gives up what is granted on another.
        """
        if slots.keys() <= self._groups.keys():
            return
        selectors = [{_NODE_ID: f"!in({','.join(sorted(avoid))})"} if avoid else {} for _, avoid in slots.values()]
        can_exclude, excludes = ray_internals.has_label_selectors(), any(selectors)
        group = self._create(
            [bundle.resources or dict(_ALMOST_NOTHING) for bundle, _ in slots.values()],
            strategy=self._strategy if len(slots) > 1 else "SPREAD" if excludes and not can_exclude else "PACK",
            **({"bundle_label_selector": selectors} if excludes and can_exclude else {}),
            **(
                {"name": named_resources.group_name(self._token, min(slots)), "lifetime": "detached"}
                if self._token
                else {}
            ),
        )
        self._groups.update({slot: (group, index) for index, slot in enumerate(slots)})

    def _create(self, bundles: list[dict[str, float]], **options: Any) -> PlacementGroup:
        if self._token or not _needs_creator():
            return placement_group(bundles, **options)
        if self._creator is None:
            self._creator = _start_creator()
        found: PlacementGroup = ray.get(self._creator.create.remote(bundles, options))
        return found

    def options(self, slot: int, bundle: Bundle) -> dict[str, Any]:
        """Return the options for an actor that runs in the slot's bundle."""
        group, index = self._groups[slot]
        return {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
        }

    def when_granted(self, slot: int, call: Callable[[], None]) -> None:
        """Call once, in a thread of Ray's, when the slot's group is granted; never, if it is released before."""
        if slot not in self._groups:
            return
        group, _ = self._groups[slot]
        group.ready().future().add_done_callback(lambda future: None if future.exception() else call())

    def hosts(self, slot: int) -> dict[int, HostId]:
        """Return the hosts of all slots of the slot's group; `""`: Ray is moving it. Empty if the slot was released."""
        if slot not in self._groups:
            return {}
        group, _ = self._groups[slot]
        found: Mapping[int, HostId] = placement_group_table(group)["bundles_to_node_id"]
        return {other: found.get(index, NO_HOST) for other, (its, index) in self._groups.items() if its == group}

    def gang_hosts(self) -> dict[int, HostId]:
        """Return the hosts of the gang's slots: Ray moves the slots of a host that died."""
        return self.hosts(self._first_of_gang)

    def release(self, slot: int) -> None:
        """Remove the slot's group, granted or pending, and with it all slots in it."""
        if slot in self._groups:
            group, _ = self._groups[slot]
            remove_placement_group(group)
            self._groups = {other: its for other, its in self._groups.items() if its[0] != group}

    def restore(self) -> None:
        """Take over the groups of another process. The gang has the first slots, and a group has slots in a row."""
        for slot, (identity, size) in named_resources.slots(self._token).items():
            group = PlacementGroup(PlacementGroupID.from_hex(identity))
            self._groups.update({slot + index: (group, index) for index in range(size)})
        self._first_of_gang = 1

    @property
    def slots(self) -> list[list[int]]:
        """The slots that have groups, by group."""
        found: dict[Any, list[int]] = {}
        for slot, (group, _) in self._groups.items():
            found.setdefault(group.id, []).append(slot)
        return [*found.values()]

    def cancel(self) -> None:
        """Remove all groups, granted or pending."""
        for group in {group for group, _ in self._groups.values()}:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                remove_placement_group(group)
        self._groups.clear()
        if self._creator is not None:
            with contextlib.suppress(Exception):
                ray.kill(self._creator)


class PlacementGroupCreator:
    """An actor that requests the placement groups of another one, or of a task, and ends with its process.

    Ray removes a placement group when its creator's job has ended and, if an actor has created it, that actor. So what
    an actor that is killed has reserved would stay as long as the job. For a detached actor, such as this one, Ray does
    not wait for the job. It also ends if it is not told with whom to end.
    """

    def __init__(self) -> None:
        self._unbegun = threading.Timer(FIRST_CALL_SECONDS, end_this_process)
        self._unbegun.daemon = True
        self._unbegun.start()

    async def never(self) -> None:
        """Do not return: the caller owns an object that is never there."""
        await asyncio.Event().wait()

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def end_with(self, owned: list[Any]) -> None:
        """End this process when the owner of an object has ended that is never there: then Ray raises an error."""
        self._unbegun.cancel()
        try:
            await owned[0]
        finally:
            end_this_process()

    async def create(self, bundles: list[dict[str, float]], options: dict[str, Any]) -> PlacementGroup:
        """Request a placement group."""
        return placement_group(bundles, **options)


def _needs_creator() -> bool:
    """Return whether this process is an actor or a task."""
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _start_creator() -> Any:
    """Start the actor for this process, on its host."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    named = {"name": f"raylaunch-groups-{secrets.token_hex(8)}", "namespace": NAMESPACE, "lifetime": "detached"}
    creator = _class().options(num_cpus=0, num_gpus=0, scheduling_strategy=here, **named).remote()
    creator.end_with.remote([creator.never.remote()])
    return creator


@functools.cache
def _class() -> Any:
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(PlacementGroupCreator)
