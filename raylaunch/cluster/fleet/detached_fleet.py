"""The fleet of a detached run: agents that outlive their driver, and that the next driver adopts."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import NodeDiedError
from ray.util.placement_group import PlacementGroup

from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.agent import AgentReport, AgentSpec
from raylaunch.cluster.agent.ray_actor import close
from raylaunch.cluster.fleet.allocator import Allocator
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet.slot_table import StartAgent, StopAgent
from raylaunch.cluster.fleet_api import AgentLost, AgentsAdopted, CommandTaken, Tell
from raylaunch.cluster.ray_api.placement_groups import PlacementGroups
from raylaunch.cluster.succession import interim_keeper, named_resources
from raylaunch.cluster.succession.agent_session import SUPERSEDED, Adoption
from raylaunch.cluster.succession.interim_keeper import InterimState
from raylaunch.cluster.succession.registry_key import NAMESPACE
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.messages import Order
from raylaunch.node.protocol.node_goal import NodeGoal

_MOST_KEEPERS = 3
"""So many agents keep a copy of the driver's state: the first that are up, each on another host if possible."""


@dataclass(slots=True, kw_only=True)
class FleetState:
    """What the fleet of the next driver needs. Times are time.monotonic() of the last one."""

    allocator: Allocator
    groups: Mapping[int, tuple[PlacementGroup, int]]
    first_of_gang: int
    placed: set[int]
    goals: dict[NodeId, NodeGoal]


class DetachedFleet(RayFleet):
    """Orders wait until `flush` sends them, with the state of the driver that follows from what it has decided."""

    def __init__(
        self,
        plan: Plan,
        spec: AgentSpec,
        say: Callable[[str], None],
        *,
        epoch: int,
        leave: Callable[[str], None],
        state: FleetState | None = None,
    ) -> None:
        """`epoch`: this driver's epoch. `leave` ends this process, and says why. `state`: of the driver before it."""
        super().__init__(plan, spec, say)
        assert spec.detached is not None
        self._token = spec.detached.token
        self._epoch = epoch
        self._leave = leave
        #: The time.monotonic() at which the head has said last that this host is alive: no other driver was started.
        self.head_answered_at = 0.0
        self._serial = 0
        self._restored = state
        self._placement_groups = PlacementGroups(spread=plan.spread, token=self._token)
        #: Nodes that obey this driver, after another one; and nodes that have reported since what is true there.
        self.adopted: set[NodeId] = set()
        self.heard: set[NodeId] = set()
        #: Nodes that are up, were asked to obey this driver, and have not answered.
        self._unadopted: set[NodeId] = set()
        #: Whether an agent obeys this driver, after another one, or there is none.
        self._commands = False
        #: The number of the last state that the interim keeper has; None: it has ended.
        self._interim: int | None = 0
        self._has_other_hosts = False
        #: Nodes whose goals `flush` will send.
        self._unsent: dict[NodeId, None] = {}
        if state is not None:
            self._allocator = state.allocator
            self._placed = state.placed
            self._goals.take_over(state.goals)

    @property
    def here(self) -> HostId:
        """The host of this process."""
        return self._here

    # Orders, and the state.

    def send(self, node: NodeId, order: Order) -> None:
        """Let the next `flush` show the node its goal with this order."""
        if node in self._actors:
            self._goals.add(node, order)
            self._unsent[node] = None

    @property
    def has_unsent(self) -> bool:
        """Whether orders wait for `flush`."""
        return bool(self._unsent)

    def flush(self, state: bytes) -> None:
        """Send the orders that wait. First those to the agents that also get the driver's state, which has them.

        `state`: empty if orders must not wait for it.
        """
        unsent, self._unsent = self._unsent, {}
        keepers = self._keepers() if state else []
        if state:
            self._serial += 1
        if state and self._needs_interim(keepers):
            self._interim = self._serial
            self._to_do.put(partial(self._keep_for_the_time_being, self._serial, state))
        for node in (*keepers, *(node for node in unsent if node not in keepers)):
            if (actor := self._actors.get(node)) is not None:
                copy = state if node in keepers else b""
                actor.obey.remote(self._epoch, serialization.dump_goal(self._goals.of(node)), self._serial, copy)

    def _keepers(self) -> list[NodeId]:
        with self._lock:
            hosts = {node: self._allocator.host_of(node) for node in self._actors if self._allocator.is_up(node)}
        by_host = {host: node for node, host in reversed(hosts.items())}
        first = [node for host, node in by_host.items() if host != self._here]
        others = [node for node in hosts if node not in first]
        return [*first, *others][:_MOST_KEEPERS]

    def _needs_interim(self, keepers: Sequence[NodeId]) -> bool:
        """Return whether no agent keeps the state, or none that would outlive the host of this process."""
        with self._lock:
            return not any(not self._has_other_hosts or self._allocator.host_of(node) != self._here for node in keepers)

    def _keep_for_the_time_being(self, serial: int, state: bytes) -> None:
        assert self._spec.detached is not None
        found = InterimState(kept=(self._epoch, serial), state=state)
        interim_keeper.keep(self._token, self._spec.detached.driver_timeout, found)

    def state(self) -> FleetState:
        """Return what the next driver needs. Its parts may change later: it is to be pickled at once, under `lock`."""
        groups, first = self._placement_groups.state
        return FleetState(
            allocator=self._allocator,
            groups=groups,
            first_of_gang=first,
            placed=set(self._placed),
            goals={node: self._goals.of(node) for node in self._actors},
        )

    @contextlib.contextmanager
    def locked(self) -> Any:
        """While the block lasts, nothing of the allocator changes."""
        with self._lock:
            yield

    # What is heard.

    def reported(self, node: NodeId, report: AgentReport) -> None:
        """Learn from a report that the node is heard again, and which state is kept there."""
        self.heard.add(node)
        self._kept(node, report.kept)

    def _kept(self, node: NodeId, serial: int) -> None:
        """An agent has this state, and all before it. 0: none of this driver."""
        if self._interim is not None and serial > self._interim and not self._needs_interim([node]):
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
        if self._restored is None:
            super().start(tell)
            return
        self._tell = tell
        self._here = HostId(ray.get_runtime_context().get_node_id())
        state, self._restored = self._restored, None
        self._placement_groups.restore(state.groups, state.first_of_gang)
        self._adopt_agents()
        self._to_do.put(partial(self._resume_requests, state))
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
        self._unadopted = {node for node in self._actors if self._allocator.is_up(node)}
        if not self._unadopted:
            self._commands = True
            self._tell(CommandTaken())
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
            is_last = self._unadopted == {node}
            self._unadopted.discard(node)
            obeys = is_last or (future.exception() is None and future.result().has_begun)
            is_first, self._commands = obeys and not self._commands, self._commands or obeys
        if is_first:
            self._tell(CommandTaken())
        if is_last:
            self._tell(AgentsAdopted())

    def _adopted(self, node: NodeId, future: Any) -> None:
        try:
            found: Adoption = future.result()
        except Exception as error:  # noqa: BLE001
            if SUPERSEDED in str(error):
                self._leave(f"{node} obeys another driver")
            self._gone(node, error)
            return
        if not found.has_begun:
            self._to_do.put(partial(self._begin_again, node))
            return
        self.adopted.add(node)
        if found.is_over or found.obeyed > self._goals.of(node).generation:
            what = "nothing was heard of the driver for too long"
            unknown = "it has carried out an order that no other agent knows of"
            self._tell(AgentLost(node=node, why=what if found.is_over else unknown))
            return
        self._actors[node].obey.remote(self._epoch, serialization.dump_goal(self._goals.of(node)))
        self._listen(node)

    def _begin_again(self, node: NodeId) -> None:
        """Start and adopt an agent whose driver died before it had told the agent to begin. In the thread."""
        with self._lock:
            request = self._allocator.start_of(node)
        actor = self._actors.get(node)
        if request is not None and actor is not None:
            actor.begin.remote(serialization.dump_spec(self._spec_for(request)))
            self._adopt(node)

    def _resume_requests(self, state: FleetState) -> None:
        """Ask Ray for what the last driver had not come to. In the thread."""
        with self._lock:
            for request in self._allocator.unfinished({*self._placement_groups.state[0]}, {*self._actors}):
                self._put(request)
        lost = [node for node in self._allocator.up_nodes() if node not in self._actors]
        alive = {str(each["NodeID"]) for each in ray.nodes() if each["Alive"]}
        for node in lost:
            error = None if self._allocator.host_of(node) in alive else NodeDiedError("Ray counts its host as dead")
            self._tell(AgentLost(node=node, why="its host died" if error else "its agent died", error=error))
        for slot in {min(group) for group in self._grouped(state)}:
            if slot in self._placement_groups.state[0]:
                self._watch(slot)

    def close(self) -> None:
        """Make each agent end its processes, for seconds at most.

        Their own processes, and what was reserved, stay until the driver has written the result, since they keep its
        state: see `named_resources.remove_nodes`.
        """
        self._stop_thread()
        with self._lock:
            up = [actor for node, actor in self._actors.items() if self._allocator.is_up(node)]
        close(up)
        self._actors = {}

    @staticmethod
    def _grouped(state: FleetState) -> list[list[int]]:
        found: dict[Any, list[int]] = defaultdict(list)
        for slot, (group, _) in state.groups.items():
            found[group.id].append(slot)
        return [*found.values()]
