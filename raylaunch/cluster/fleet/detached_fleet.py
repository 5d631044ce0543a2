"""The fleet of a detached run: agents that outlive their driver, and that the next driver adopts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.agent import AgentReport, AgentSpec
from raylaunch.cluster.agent.ray_actor import close
from raylaunch.cluster.fleet.allocator import Allocator
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet.slot_table import StartAgent, StopAgent
from raylaunch.cluster.fleet_api import AgentAdopted, AgentLost, AgentsAdopted, Tell
from raylaunch.cluster.ray_api.placement_groups import PlacementGroups
from raylaunch.cluster.succession import interim_keeper, named_resources
from raylaunch.cluster.succession.agent_session import SUPERSEDED, Adoption
from raylaunch.cluster.succession.interim_keeper import InterimState
from raylaunch.cluster.succession.registry_key import NAMESPACE
from raylaunch.core.newtypes import HostId, NodeId, NodeTime
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.messages import Order

_MOST_KEEPERS = 3
"""This number of agents keep the ledger: the first that are up, each on another host if possible."""


class DetachedFleet(RayFleet):
    """Orders wait until `flush` sends them, with the ledger of the driver that follows from what it has decided."""

    def __init__(
        self,
        plan: Plan,
        spec: AgentSpec,
        say: Callable[[str], None],
        *,
        epoch: int,
        leave: Callable[[str], None],
        allocator: Allocator | None = None,
    ) -> None:
        """`epoch`: this driver's epoch. `leave` ends this process, and says why. `allocator`: of an earlier driver."""
        super().__init__(plan, spec, say)
        assert spec.detached is not None
        self._token = spec.detached.token
        self._epoch = epoch
        self._leave = leave
        #: The time.monotonic() at which the head has said last that this host is alive: no other driver was started.
        self.head_answered_at = 0.0
        #: The number of the last ledger.
        self._number = 0
        self._takes_over = allocator is not None
        self._placement_groups = PlacementGroups(spread=plan.spread, token=self._token)
        #: Nodes that were asked to obey this driver, and have not answered: what they were told is not known.
        self._unadopted: set[NodeId] = set()
        #: Those of them that are up.
        self._awaited: set[NodeId] = set()
        #: The number of the last ledger that the interim keeper has; None: it has ended.
        self._interim: int | None = 0
        self._has_other_hosts = False
        #: Nodes whose goals `flush` will send.
        self._unsent: dict[NodeId, None] = {}
        if allocator is not None:
            self._allocator = allocator

    @property
    def here(self) -> HostId:
        """The host of this process."""
        return self._here

    # Orders, and the ledger.

    def send(self, node: NodeId, order: Order) -> None:
        """Let the next `flush` show the node its goal with this order."""
        if node in self._actors:
            self._goals.add(node, order)
            self._unsent[node] = None

    @property
    def has_unsent(self) -> bool:
        """Whether orders wait for `flush` that it can send."""
        return any(node not in self._unadopted for node in self._unsent)

    def flush(self, ledger: bytes) -> None:
        """Send the orders that wait. First those to the agents that also get the ledger, which is about them.

        `ledger`: empty if orders must not wait for it.
        """
        unsent = [node for node in self._unsent if node not in self._unadopted]
        self._unsent = {node: None for node in self._unsent if node in self._unadopted}
        keepers = self._keepers() if ledger else []
        if ledger:
            self._number += 1
        if ledger and self._needs_interim(keepers):
            self._interim = self._number
            self._to_do.put(partial(self._keep_for_the_time_being, self._number, ledger))
        for node in (*keepers, *(node for node in unsent if node not in keepers)):
            if (actor := self._actors.get(node)) is not None:
                kept = ledger if node in keepers else b""
                actor.obey.remote(self._epoch, serialization.dump_goal(self._goals.of(node)), self._number, kept)

    def _keepers(self) -> list[NodeId]:
        obeying = [node for node in self._actors if node not in self._unadopted]
        with self._lock:
            hosts = {node: self._allocator.host_of(node) for node in obeying if self._allocator.is_up(node)}
        by_host = {host: node for node, host in reversed(hosts.items())}
        first = [node for host, node in by_host.items() if host != self._here]
        others = [node for node in hosts if node not in first]
        return [*first, *others][:_MOST_KEEPERS]

    def _needs_interim(self, keepers: Sequence[NodeId]) -> bool:
        """Return whether no agent keeps the ledger, or none that would outlive the host of this process."""
        with self._lock:
            return not any(not self._has_other_hosts or self._allocator.host_of(node) != self._here for node in keepers)

    def _keep_for_the_time_being(self, number: int, ledger: bytes) -> None:
        assert self._spec.detached is not None
        found = InterimState(kept=(self._epoch, number), ledger=ledger)
        interim_keeper.keep(self._token, self._spec.detached.driver_timeout, found)

    @contextlib.contextmanager
    def allocator(self) -> Iterator[Allocator]:
        """Yield what is known of slots, for the ledger. While the block lasts, it does not change."""
        with self._lock:
            yield self._allocator

    # What is heard.

    def reported(self, node: NodeId, number: int) -> None:
        """Learn that an agent has this ledger, or a later one. 0: none of this driver."""
        if self._interim is not None and number > self._interim and not self._needs_interim([node]):
            self._interim = None
            self._to_do.put(partial(interim_keeper.end, self._token))

    def _gone(self, node: NodeId, error: BaseException) -> None:
        if SUPERSEDED in str(error):
            self._leave(f"{node} obeys another driver")
        super()._gone(node, error)

    def _head_answers(self) -> None:
        self.head_answered_at = time.monotonic()
        super()._head_answers()

    # Agents.

    def _start(self, request: StartAgent, spec: AgentSpec, options: Mapping[str, Any]) -> None:
        named = {"name": named_resources.agent_name(self._token, self._epoch, request.node), "namespace": NAMESPACE}
        super()._start(request, spec, {**options, **named, "lifetime": "detached"})

    def _kill(self, actor: Any, request: StopAgent) -> None:
        """Tell the agent to end itself, if this driver is in command: Ray would kill it whoever asks."""
        if request.never_started:
            super()._kill(actor, request)
        else:
            actor.leave.remote(self._epoch)

    def start(self, tell: Tell) -> None:
        """Reserve the gang; or, after another driver, adopt its agents and go on with its reservations."""
        self._has_other_hosts = sum(node["Alive"] for node in ray.nodes()) > 1
        if not self._takes_over:
            super().start(tell)
            return
        self._tell = tell
        self._here = HostId(ray.get_runtime_context().get_node_id())
        self._placement_groups.restore()
        self._adopt_agents()
        groups = self._placement_groups.slots
        with self._lock:  # what the last driver had not come to
            for request in self._allocator.unfinished({slot for group in groups for slot in group}, {*self._actors}):
                self._put(request)
        self._to_do.put(partial(self._look_at_hosts, [min(group) for group in groups]))
        self._thread.start()
        self._drains.start()
        self._head.start()

    def _adopt_agents(self) -> None:
        """Take command of all agents that a slot still has, and end the others."""
        for name, node in named_resources.agents(self._token).items():
            actor = named_resources.actor(name)
            if actor is None:
                continue  # it has just died
            if NodeId(node) in self._actors or self._allocator.start_of(NodeId(node)) is None:
                ray.kill(actor)
            else:
                self._actors[NodeId(node)] = actor
        self._unadopted = {*self._actors}
        self._awaited = {node for node in self._actors if self._allocator.is_up(node)}
        if not self._awaited:
            self._tell(AgentsAdopted())
        for found in [*self._actors]:
            self._adopt(found)

    def _adopt(self, node: NodeId) -> None:
        if (actor := self._actors.get(node)) is not None:
            asked = actor.adopt.remote(self._epoch, self._spec.link_address)
            asked.future().add_done_callback(partial(self._answered, node))

    def _answered(self, node: NodeId, future: Any) -> None:
        self._adopted(node, future)
        with self._lock:
            is_last = self._awaited == {node}
            self._awaited.discard(node)
        if is_last:
            self._tell(AgentsAdopted())

    def _adopted(self, node: NodeId, future: Any) -> None:
        found: Adoption
        try:
            found, message = future.result()
            report = serialization.load_report(message) if message else AgentReport(sent_at=NodeTime(0.0))
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)
            return
        if not found.has_begun:
            self._to_do.put(partial(self._begin_again, node))
            return
        goal = self._goals.take_over(node, found.goal)
        self._unadopted.discard(node)
        if found.is_over:
            self._tell(AgentLost(node=node, why="nothing was heard of the driver for too long"))
            return
        self._tell(AgentAdopted(node=node, goal=goal, report=report, at=time.monotonic()))
        self._listen(node)

    def _begin_again(self, node: NodeId) -> None:
        """Start and adopt an agent whose driver died before it had told the agent to begin. In the thread."""
        with self._lock:
            request = self._allocator.start_of(node)
        actor = self._actors.get(node)
        if request is not None and actor is not None:
            actor.begin.remote(serialization.dump_spec(self._spec_for(request)))
            self._adopt(node)

    def _look_at_hosts(self, granted: Sequence[int]) -> None:
        """Tell of agents that are gone, and wait for the groups of these slots to be granted. In the thread."""
        lost = [node for node in self._allocator.up_nodes() if node not in self._actors]
        alive = {str(each["NodeID"]) for each in ray.nodes() if each["Alive"]}
        for node in lost:
            is_host_dead = self._allocator.host_of(node) not in alive
            why = "its host died" if is_host_dead else "its agent died"
            self._tell(AgentLost(node=node, why=why, is_host_dead=is_host_dead))
        for slot in granted:
            self._watch(slot)

    def close(self) -> None:
        """Make each agent end its processes, for seconds at most.

        Their own processes, and what was reserved, stay until the driver has written the result, since they keep the
        ledger: see `named_resources.remove_nodes`.
        """
        self._stop_thread()
        with self._lock:
            up = [actor for node, actor in self._actors.items() if self._allocator.is_up(node)]
        close(up)
        self._actors = {}
