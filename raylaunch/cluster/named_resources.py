"""What a detached run has in the cluster beside its processes, by names that begin with its token."""

from __future__ import annotations

import contextlib
import time
from math import inf
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

from raylaunch.cluster import ray_internals
from raylaunch.cluster.registry_key import NAMESPACE, RENEW_SECONDS, registry_key

_EPOCHS = b"raylaunch-epochs"
"""The namespace in the key-value store of the head."""
_DRIVER, _AGENT, _GROUP = "raylaunch-driver", "raylaunch-agent", "raylaunch-slots"
_INTERIM = "raylaunch-interim-keeper"
_ANSWER_SECONDS = 5.0
"""How long a driver may take to say that it is there."""
_HEAD_SECONDS = 2.0
_RENEWAL_SECONDS = 2 * RENEW_SECONDS
"""In this time, a driver that reaches the head has renewed the entry of its run."""


def driver_name(token: str) -> str:
    """Return the name of the run's driver."""
    return f"{_DRIVER}-{token}"


def token_of(driver: str) -> str:
    """Return the token in the name of a driver."""
    return driver.removeprefix(f"{_DRIVER}-")


def interim_keeper_name(token: str) -> str:
    """Return the name of what keeps the ledger while no agent does."""
    return f"{_INTERIM}-{token}"


def agent_name(token: str, epoch: int, node: str) -> str:
    """Return the name of the agent of a node that the driver of this epoch has started."""
    return f"{_AGENT}-{token}-{epoch}-{node}"


def agents(token: str) -> dict[str, str]:
    """Return the nodes of the run's agents, by the agents' names, the latest epoch first.

    A driver may not know of an agent that the one before it has started last, and give another the name of that node.
    """
    prefix = f"{_AGENT}-{token}-"
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]
    parts = [(*name.removeprefix(prefix).split("-", 1), name) for name in ours]
    return {name: node for epoch, node, name in sorted(parts, key=lambda part: -int(part[0]))}


def group_name(token: str, slot: int) -> str:
    """Return the name of the placement group whose first slot this is."""
    return f"{_GROUP}-{token}-{slot}"


def announce(token: str, epoch: int) -> None:
    """Record in the head that the driver of this epoch begins, or takes over. Raises an exception of Ray's."""
    ray_internals.keep_in_head(token.encode(), str(epoch).encode(), _EPOCHS, _ANSWER_SECONDS)


def announced(token: str) -> int | None:
    """Return the epoch of the last driver; None: nothing is left of the run.

    Raises an exception of Ray's if the head does not answer.
    """
    epoch = ray_internals.own_kept(token.encode(), _EPOCHS, _HEAD_SECONDS)
    return int(epoch) if epoch else None


def groups(token: str) -> dict[str, str]:
    """Return the ids of the run's placement groups, by their names."""
    return {group_name(token, slot): identity for slot, (identity, _) in slots(token).items()}


def slots(token: str) -> dict[int, tuple[str, int]]:
    """Return the ids of the run's placement groups and their numbers of slots, by the first slot."""
    prefix = f"{_GROUP}-{token}-"
    found = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
    ours = [each for each in found if each["name"].startswith(prefix)]
    return {int(each["name"].removeprefix(prefix)): (each["placement_group_id"], len(each["bundles"])) for each in ours}


def _remove_group(name: str) -> None:
    """Remove a placement group, if it is there."""
    with contextlib.suppress(Exception):
        remove_placement_group(get_placement_group(name))


def actor(name: str) -> Any:
    """Return the actor of this name; None: it is not there, or has ended. Raises RayError."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)
    return None


def has_driver(token: str) -> bool:
    """Return whether the run has a driver. Waits until the head answers: before, this host may be cut off.

    A driver that does not answer here may be reached by others. It shows by the entry of the run, which it renews: for
    that, this waits for another minute.
    """
    entry, until = None, inf
    while time.monotonic() < until:
        try:
            if entry is None:
                entry, until = _entry(token), time.monotonic() + _RENEWAL_SECONDS
            driver = actor(driver_name(token))
            if driver is None or _entry(token) != entry:
                return driver is not None
            if _answers(driver):
                return True
        except (RayError, RuntimeError):  # Ray ends this process when no head has answered for a minute
            entry, until = None, inf
        time.sleep(_HEAD_SECONDS)
    return False


def _answers(driver: Any) -> bool:
    with contextlib.suppress(RayError):
        return bool(ray.get(driver.is_there.remote(), timeout=_ANSWER_SECONDS))
    return False


def _entry(token: str) -> bytes:
    return ray_internals.own_kept(registry_key(token), NAMESPACE.encode(), _ANSWER_SECONDS)


def kill(name: str) -> None:
    """Kill the actor of this name, if it is there."""
    with contextlib.suppress(Exception):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def remove_nodes(token: str) -> None:
    """Remove the placement groups of a run and its agents; what has the calling process in it comes last.

    Several agents may do that at one time. None kills another before the group of that one is removed: else two could
    kill each other, and their groups would stay.
    """
    me, mine = ray.get_runtime_context().get_actor_name(), get_current_placement_group()
    own: list[str] = []
    with contextlib.suppress(Exception):
        found = groups(token)
        own = [name for name, identity in found.items() if mine is not None and identity == mine.id.hex()]
        for name in found.keys() - {*own}:
            _remove_group(name)
        for name in agents(token).keys() - {me}:
            kill(name)
    for name in own:
        _remove_group(name)


def remove(token: str) -> None:
    """Remove all that a run has in the cluster; the calling process comes last, if it is part of the run."""
    me = ray.get_runtime_context().get_actor_name()
    keys = ((registry_key(token), NAMESPACE.encode()), (token.encode(), _EPOCHS))
    for key, namespace in keys:
        with contextlib.suppress(Exception):  # the head does not answer
            ray_internals.keep_in_head(key, None, namespace, _ANSWER_SECONDS)
    for name in {driver_name(token), interim_keeper_name(token)} - {me}:
        kill(name)
    remove_nodes(token)
    if me:
        kill(me)
