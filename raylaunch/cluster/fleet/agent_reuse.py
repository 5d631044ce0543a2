"""How a run uses agents that an earlier run left idle, and leaves its own to the next one (`keep_warm`). For RayFleet.

Such an agent is a detached actor. It runs beside the bundle that was granted on its host, not in it: Ray ends whatever
is in a placement group together with the group, which each run has of its own. Its name says for whom it is idle: for
runs of the same user, on the same machine, in the same folder. The agent itself knows whether it can serve a run, and
ends if it cannot, so a folder has agents of one kind. Nobody has to end those that no run comes for: their lease does.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster import named_resources
from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.ray_actor import dismiss
from raylaunch.cluster.fleet.allocator import StartAgent
from raylaunch.cluster.registry_key import NAMESPACE
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.plan import Bundle
from raylaunch.node.linux import procfs
from raylaunch.node.protocol.node_spec import AgentSpec

_REUSE_SECONDS = 10.0
"""How long an idle agent has to answer a run that wants to use it."""
_IDLE_SECONDS = 7.0
"""How long the agents of a run have to become idle, or to say whether they are."""

Options = Mapping[str, Any]
"""Ray's options for the creation of an actor."""
Start = Callable[[StartAgent, AgentSpec, Options], None]


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where an agent of the run starts, or is used again."""

    request: StartAgent
    spec: AgentSpec
    host: HostId


@dataclass(frozen=True, slots=True)
class _PendingReuse:
    """An agent that was asked to serve the run and has not answered yet."""

    placement: _Placement
    actor: Any
    until: float


class AgentReuse:
    """Starts agents, or uses idle ones. All methods but `make_idle` are called by the fleet's own thread."""

    def __init__(
        self,
        options: Callable[[int, Bundle], Options],
        start: Start,
        take: Callable[[NodeId, Any], None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """`options` returns the options for an agent inside a slot's bundle; `start` starts one with such options.

        `take` adds an actor that is running already, as the node of that name. `call` lets the fleet's thread make a
        call.
        """
        self._options = options
        self._start = start
        self._take = take
        self._call = call
        #: Slots that have a host, or had one.
        self._placed: set[int] = set()
        #: Agents to start when it is known where, by slot.
        self._unplaced: dict[int, tuple[StartAgent, AgentSpec]] = {}
        #: Names of agents that an earlier run may have left, which were not asked yet.
        self._left: list[str] = []
        self._pending: dict[NodeId, _PendingReuse] = {}
        #: The nodes whose agents run beside their bundles.
        self._beside: set[NodeId] = set()

    def start(self, request: StartAgent, spec: AgentSpec) -> None:
        """Start an agent. Where its slot has had no host yet, that waits for one, which may have an idle agent."""
        if request.slot in self._placed:
            self._start(request, spec, self._options(request.slot, request.bundle))
        else:
            self._unplaced[request.slot] = (request, spec)

    def granted(self, hosts: Mapping[int, HostId]) -> None:
        """Slots were granted. `hosts`: by slot."""
        self._placed.update(hosts)
        self._left = _names(_folder_prefix())
        for slot, host in hosts.items():
            request, spec = self._unplaced.pop(slot, (None, None))
            if request is None or spec is None:
                continue
            if host:
                self._beside.add(request.node)
                self._ask_next(_Placement(request, spec, host))
            else:  # Ray moved the bundle meanwhile, and will start the agent wherever that is
                self._start(request, spec, self._options(slot, request.bundle))

    def _ask_next(self, placement: _Placement) -> None:
        """Ask the next agent on this host to serve the run; start one where none is left."""
        prefix, node = f"{_folder_prefix()}{placement.host}-", placement.request.node
        if actor := self._next_left(prefix):
            self._pending[node] = _PendingReuse(placement, actor, time.monotonic() + _REUSE_SECONDS)
            answer = actor.reuse.remote(serialization.dump_spec(placement.spec)).future()
            answer.add_done_callback(lambda future: self._call(partial(self._answered, node, future)))
            return
        on_host = NodeAffinitySchedulingStrategy(placement.host, soft=False)
        named = {"name": f"{prefix}{secrets.token_hex(8)}", "namespace": NAMESPACE, "lifetime": "detached"}
        options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": on_host, **named}
        self._start(placement.request, placement.spec, options)

    def _next_left(self, prefix: str) -> Any:
        """Return the next agent whose name begins so, and that was not asked yet; None: there is none."""
        names = [name for name in self._left if name.startswith(prefix)]
        self._left = [name for name in self._left if name not in names]
        while names:
            if (actor := named_resources.actor(names.pop(0))) is not None:
                self._left += names
                return actor
        return None

    def _answered(self, node: NodeId, future: Any) -> None:
        pending = self._pending.pop(node, None)
        if pending is None:
            return
        if future.exception() is None and future.result():
            self._take(node, pending.actor)
        else:
            self._ask_next(pending.placement)

    def check_deadlines(self, now: float) -> None:
        """Ask other agents, or start new ones, in place of those that did not answer in time."""
        for node, pending in list(self._pending.items()):
            if pending.until <= now:
                del self._pending[node]
                dismiss([pending.actor])
                self._ask_next(pending.placement)

    def close(self) -> None:
        """End the agents that have not answered yet."""
        dismiss([pending.actor for pending in self._pending.values()])
        self._pending.clear()

    def stopped(self, node: NodeId) -> None:
        """The node is not wanted any more."""
        self._unplaced = {slot: wanted for slot, wanted in self._unplaced.items() if wanted[0].node != node}
        self._beside.discard(node)
        pending = self._pending.pop(node, None)
        if pending is not None:
            dismiss([pending.actor])

    def can_be_idle(self, node: NodeId) -> bool:
        """Return whether the node's agent runs beside its bundle, so that it can outlive the run."""
        return node in self._beside

    def make_idle(self, actors: Mapping[NodeId, Any], seconds: float) -> None:
        """Leave agents of a run that is over to the next one for some seconds. `actors`: by node, all `can_be_idle`.

        Agents that do not become idle within seconds are ended.
        """
        idle = _that_agree({actor: actor.become_idle.remote(seconds) for actor in actors.values()})
        dismiss([actor for actor in actors.values() if actor not in idle])


def end_idle() -> int:
    """End all idle agents of this user's runs on this machine. Return their number."""
    found = filter(None, map(named_resources.actor, _names(_prefix())))
    return len(_that_agree({actor: actor.end_if_idle.remote() for actor in found}))


def _that_agree(answers: Mapping[Any, Any]) -> list[Any]:
    """Return the actors whose answer is true, and arrives in time. `answers`: references, by actor."""
    ready = ray.wait([*answers.values()], num_returns=len(answers), timeout=_IDLE_SECONDS)[0] if answers else []
    return [actor for actor, answer in answers.items() if answer in ready and _is_true(answer)]


def _is_true(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except RayError:
        return False


def _prefix() -> str:
    return f"raylaunch-warm-{procfs.user_name()}@{socket.gethostname()}-"


def _folder_prefix() -> str:
    return f"{_prefix()}{hashlib.sha256(os.fsencode(os.getcwd())).hexdigest()[:16]}-"


def _names(prefix: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]
