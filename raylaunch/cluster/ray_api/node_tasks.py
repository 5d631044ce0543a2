"""Runs a function on every node of the cluster, as a task of Ray that needs no resources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster import ray_internals

Answer = TypeVar("Answer")


def nodes() -> dict[str, str]:
    """Return the addresses of the nodes that are alive, by Ray's node id."""
    return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def draining() -> tuple[str, ...]:
    """Return the addresses of the nodes that are being drained."""
    found = ray_internals.draining_nodes()
    return tuple(address for node, address in nodes().items() if node in found)


def has_token() -> bool:
    """Return whether this process sends a token."""
    try:
        return ray_internals.token() != ""
    except ray_internals.AuthenticationError:
        return False


def on_each(
    on: Mapping[str, str], function: Callable[[], Answer], seconds: float
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Call a function on every node. Return the answers, and why others gave none, both by the node's address.

    A function that raises is one that gave none: for example where raylaunch cannot be imported.
    """

    def call() -> Answer:  # Ray takes no `functools.partial`
        return function()

    task: Any = ray.remote(num_cpus=0, max_retries=0)(call)
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): address
        for node, address in on.items()
    }
    ray.wait(list(pending), num_returns=len(pending), timeout=seconds)
    answers: dict[str, Answer] = {}
    silent: dict[str, str] = {}
    for reference, address in pending.items():
        try:
            answers[address] = ray.get(reference, timeout=0)
        except TimeoutError:  # Ray's GetTimeoutError is one
            silent[address] = f"not within {seconds:g} s"
            ray.cancel(reference, force=True)
        except RayError as error:
            silent[address] = str(error).strip().splitlines()[-1]
    return answers, silent


def clocks(on: Mapping[str, str], seconds: float) -> dict[str, tuple[float, float]]:
    """Return by address how far the clock of each node is ahead of this one's, and how far that may be wrong.

    All are asked at once, by processes that have answered before.
    """
    began = time.time()
    answers, _ = on_each(on, time.time, seconds)
    bound = (time.time() - began) / 2
    return {address: (at - (began + bound), bound) for address, at in answers.items()}
