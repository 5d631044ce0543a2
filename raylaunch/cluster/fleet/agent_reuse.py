"""How a run uses agents that the run before left idle, and leaves its own to the next one. Used by RayFleet.

Such an agent runs beside the bundle that was granted on its host, not in it: Ray ends whatever is in a placement group
together with the group, which each run has of its own.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster.agent.ray_actor import IdleAgent, dismiss
from raylaunch.cluster.fleet import agent_pool
from raylaunch.cluster.fleet.agent_pool import AgentPool, PooledAgent
from raylaunch.cluster.fleet.slot_table import StartAgent
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.packing import Bundle
from raylaunch.node.protocol.node_spec import AgentSpec

_REUSE_SECONDS = 10.0
"""How long an idle agent has to answer a run that wants to use it."""
_IDLE_SECONDS = 7.0
"""How long the agents of a run have to become idle."""
_MARGIN_SECONDS = 30.0
"""How much longer an agent would stay idle by itself than this process lets it."""

Options = Mapping[str, Any]
"""Ray's options for the creation of an actor."""
Start = Callable[[StartAgent, AgentSpec, Options], None]


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where an agent of the run starts, or is used again."""

    request: StartAgent
    spec: AgentSpec
    host: HostId
    address: str


@dataclass(frozen=True, slots=True)
class _PendingReuse:
    """An idle agent that was asked to serve the run and has not answered yet."""

    placement: _Placement
    actor: Any
    until: float


class AgentReuse:
    """All methods but `make_idle` are called by the fleet's own thread."""

    def __init__(
        self,
        pool: AgentPool,
        options: Callable[[int, Bundle], Options],
        start: Start,
        take: Callable[[NodeId, Any], None],
        calls: queue.SimpleQueue[Any],
    ) -> None:
        """`options` returns the options for an agent inside a slot's bundle; `start` starts one with such options.

        `take` adds an actor that is running already, as the node of that name. `calls`: what the fleet's thread calls.
        """
        self._pool = pool
        self._options = options
        self._start = start
        self._take = take
        self._calls = calls
        #: Agents to start when it is known where, by slot.
        self._unplaced: dict[int, tuple[StartAgent, AgentSpec]] = {}
        self._pending: dict[NodeId, _PendingReuse] = {}
        #: The agents that run beside their bundles, by node.
        self._beside: dict[NodeId, _Placement] = {}

    def start_when_granted(self, request: StartAgent, spec: AgentSpec) -> None:
        """Start an agent, or use an idle one, as soon as its slot is granted."""
        self._unplaced[request.slot] = (request, spec)

    def granted(self, hosts: Mapping[int, HostId], address: Callable[[HostId], str]) -> None:
        """Slots were granted. `hosts`: by slot; `address` returns the address of a host."""
        for slot, host in hosts.items():
            request, spec = self._unplaced.pop(slot, (None, None))
            if request is None or spec is None:
                continue
            if host:
                self._place(_Placement(request, spec, host, address(host)))
            else:  # Ray moved the bundle meanwhile, and will start the agent wherever that is
                self._start(request, spec, self._options(slot, request.bundle))

    def _place(self, placement: _Placement) -> None:
        node = placement.request.node
        self._beside[node] = placement
        actor = self._pool.take(placement.host, agent_pool.key_of(placement.spec))
        if actor is None:
            self._start_new(placement)
            return
        self._pending[node] = _PendingReuse(placement, actor, time.monotonic() + _REUSE_SECONDS)
        answer = actor.reuse.remote(placement.spec).future()
        answer.add_done_callback(lambda future: self._calls.put(partial(self._answered, node, future)))

    def _start_new(self, placement: _Placement) -> None:
        on_host = NodeAffinitySchedulingStrategy(placement.host, soft=False)
        options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": on_host}
        self._start(placement.request, placement.spec, options)

    def _answered(self, node: NodeId, future: Any) -> None:
        pending = self._pending.pop(node, None)
        if pending is None:
            return
        if future.exception() is None and future.result():
            self._take(node, pending.actor)
        else:
            self._replace(pending)

    def check_deadlines(self, now: float) -> None:
        """Start new agents in place of idle ones that did not answer in time."""
        for node, pending in list(self._pending.items()):
            if pending.until <= now:
                del self._pending[node]
                self._replace(pending)

    def _replace(self, pending: _PendingReuse) -> None:
        dismiss([pending.actor])
        self._start_new(pending.placement)

    def close(self) -> None:
        """End the idle agents that have not answered yet."""
        dismiss([pending.actor for pending in self._pending.values()])
        self._pending.clear()

    def stopped(self, node: NodeId) -> None:
        """The node is not wanted any more."""
        self._unplaced = {slot: wanted for slot, wanted in self._unplaced.items() if wanted[0].node != node}
        self._beside.pop(node, None)
        pending = self._pending.pop(node, None)
        if pending is not None:
            dismiss([pending.actor])

    def can_be_idle(self, node: NodeId) -> bool:
        """Return whether the node's agent runs beside its bundle, so that it can outlive the run."""
        return node in self._beside

    def make_idle(self, actors: Mapping[NodeId, Any], seconds: float) -> None:
        """Put agents of a run that is over into the pool for some seconds. `actors`: by node, all `can_be_idle`.

        Agents that do not become idle within seconds are ended.
        """
        placements = {node: self._beside[node] for node in actors}
        names = dict(zip(placements, self._pool.new_names(len(placements)), strict=True))
        addresses = {node: self._pool.link_address(of.spec.link_address) for node, of in placements.items()}
        answers = {
            node: actors[node].become_idle.remote(names[node], addresses[node], seconds + _MARGIN_SECONDS)
            for node in placements
        }
        if answers:
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=_IDLE_SECONDS)
        idle = {node: found for node, ref in answers.items() if (found := _answer(ref)) is not None}
        dismiss([actor for node, actor in actors.items() if node not in idle])
        self._pool.put(
            [
                PooledAgent(
                    name=names[node],
                    handle=actors[node],
                    key=agent_pool.key_of(placements[node].spec),
                    host=placements[node].host,
                    nproc=placements[node].spec.nproc,
                    address=placements[node].address,
                    pid=found.pid,
                    memory=found.memory,
                )
                for node, found in idle.items()
            ],
            seconds,
        )


def _answer(ref: Any) -> IdleAgent | None:
    """Return an answer that has arrived; None: none has, or the agent cannot be used again."""
    try:
        found: IdleAgent | None = ray.get(ref, timeout=0)
    except RayError:
        return None
    return found
