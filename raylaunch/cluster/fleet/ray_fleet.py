"""The fleet of agents that are Ray actors: does with Ray what the allocator requests, and talks to the actors."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from raylaunch.cluster import named_resources, ray_internals
from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.agent.agent_session import SUPERSEDED, Adoption
from raylaunch.cluster.agent.ray_actor import TITLE, actor_class, close, creation_arguments, kill
from raylaunch.cluster.fleet.agent_reuse import AgentReuse
from raylaunch.cluster.fleet.allocator import (
    Allocator,
    AnnounceNode,
    FleetBase,
    ReleaseSlot,
    Request,
    ReserveGang,
    ReserveSlot,
    StartAgent,
    StopAgent,
)
from raylaunch.cluster.fleet_api import (
    AgentAdopted,
    AgentLost,
    AgentsAdopted,
    FleetFailed,
    HostDraining,
    ReportReceived,
    SlotGranted,
    Tell,
)
from raylaunch.cluster.ray_api import actor_errors, gcs_monitor
from raylaunch.cluster.ray_api.gcs_monitor import GcsMonitor
from raylaunch.cluster.ray_api.placement_groups import PlacementGroups, Reservations
from raylaunch.cluster.ray_internals import AuthenticationError
from raylaunch.cluster.registry_key import NAMESPACE
from raylaunch.core.newtypes import NO_HOST, HostId, NodeId, NodeTime
from raylaunch.core.placement.plan import Plan
from raylaunch.core.text import count
from raylaunch.errors import ClusterError
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_goal import NodeGoals, Order
from raylaunch.node.protocol.node_spec import AgentSpec

_JOIN_SECONDS = 2.0
_ASK_SECONDS = 60.0
"""For how long a request to Ray is repeated while the head does not answer."""
_START_SECONDS = 120.0
"""How long Ray may take to start an agent's process: twice what it waits itself (`worker_register_timeout_seconds`)."""
_SETUP_SECONDS = 600.0
"""How long it may take, before that, to make a runtime environment on a host (its `setup_timeout_seconds`)."""
LOOK_SECONDS = 1.0
_END_NODE_SECONDS = 2.0
"""How long an agent may take to end its node before it is killed."""


class RayAgents:
    """Calls the actors. One call of `next_report` is always pending at each: whatever happens is pushed to the driver.

    In a detached run, orders wait until `flush` sends them.
    """

    def __init__(
        self,
        epoch: int,
        leave: Callable[[str], None] | None,
        started: Callable[[NodeId], None],
        begin_again: Callable[[NodeId], None],
    ) -> None:
        """`epoch`: of this driver's calls. `leave`: as in `RayFleet`.

        `started` is called when an agent has reported; `begin_again` for one that no driver has told what to do. Any
        thread calls both.
        """
        self.actor_class = actor_class()
        #: Actor handles of all and only the agents that were started and are neither lost nor released.
        self._actors: dict[NodeId, Any] = {}
        self._goals = NodeGoals()
        self._epoch = epoch
        self._leave = leave
        self.tell: Tell = lambda _: None
        self._started = started
        self._begin_again = begin_again
        #: Nodes whose goals `flush` will send.
        self._unsent: dict[NodeId, None] = {}
        #: Nodes that were asked to obey this driver, and have not answered: what they were told is not known.
        self._unadopted: set[NodeId] = set()
        #: The nodes among them that are up.
        self._awaited: set[NodeId] = set()

    def __contains__(self, node: NodeId) -> bool:
        return node in self._actors

    def __iter__(self) -> Iterator[NodeId]:
        return iter([*self._actors])

    def start(self, request: StartAgent, spec: AgentSpec, options: Mapping[str, Any]) -> None:
        """Start an agent. `options`: Ray's, for the creation of the actor."""
        named = {}
        if spec.token:
            name = named_resources.agent_name(spec.token, self._epoch, request.node)
            named = {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        try:
            actor = self.actor_class.options(**options, **named).remote(*creation_arguments(spec))
            actor.begin.remote(serialization.dump_spec(spec))
        except (RayError, RuntimeError) as error:
            self.tell(AgentLost(node=request.node, why=actor_errors.summary(error), error=error))
        else:
            self.take(request.node, actor)

    def take(self, node: NodeId, actor: Any) -> None:
        """Add an actor that is running already."""
        self._actors[node] = actor
        self._listen(node)

    def _listen(self, node: NodeId) -> None:
        if (actor := self._actors.get(node)) is None:
            return

        def heard(future: Any) -> None:
            try:
                report = serialization.load_report(future.result())
            except Exception as error:  # noqa: BLE001
                self._gone(node, error)
                return
            self._started(node)
            self.tell(ReportReceived(node=node, at=time.monotonic(), report=report))
            self._listen(node)

        # The name of the pending call is what Ray shows in the title of the agent's process.
        actor.next_report.options(name=TITLE).remote(self._epoch).future().add_done_callback(heard)

    def _gone(self, node: NodeId, error: BaseException) -> None:
        if self._leave is not None and SUPERSEDED in str(error):
            self._leave(f"{node} obeys another driver")
        if node in self._actors:
            is_host_dead = actor_errors.is_of_dead_host(error)
            self.tell(AgentLost(node=node, why=actor_errors.summary(error), error=error, is_host_dead=is_host_dead))

    # Orders.

    def send(self, node: NodeId, order: Order) -> None:
        """Show the actor its goal. Nothing comes back: `next_report` raises what goes wrong there."""
        if (actor := self._actors.get(node)) is None:
            return
        goal = self._goals.add(node, order)
        if self._leave is None:
            actor.obey.remote(self._epoch, serialization.dump_goal(goal))
        else:
            self._unsent[node] = None

    @property
    def has_unsent(self) -> bool:
        """Whether orders wait for `flush` that it can send."""
        return any(node not in self._unadopted for node in self._unsent)

    @property
    def obeying(self) -> list[NodeId]:
        """The nodes of which it is known what they were told."""
        return [node for node in self._actors if node not in self._unadopted]

    def flush(self, keepers: Sequence[NodeId], ledger: bytes) -> int:
        """Send the orders that wait, first to the agents that also get the ledger. Return the generation of that."""
        generation = self._goals.next_generation()
        unsent = [node for node in self._unsent if node not in self._unadopted]
        self._unsent = {node: None for node in self._unsent if node in self._unadopted}
        for node in dict.fromkeys((*keepers, *unsent)):
            if (actor := self._actors.get(node)) is not None:
                goal = serialization.dump_goal(replace(self._goals.of(node), generation=generation))
                actor.obey.remote(self._epoch, goal, ledger if node in keepers else b"")
        return generation

    # After another driver.

    def adopt(self, actors: Mapping[NodeId, Any], awaited: Collection[NodeId], link: SecretAddress | None) -> None:
        """Command the agents of another driver. `AgentsAdopted` is told when the agents of `awaited` have answered.

        `link`: where they open their links to this driver.
        """
        self._actors.update(actors)
        self._unadopted, self._awaited = {*actors}, {*awaited}
        if not awaited:
            self.tell(AgentsAdopted())
        for node in actors:
            self._ask_to_obey(node, link)

    def begin(self, node: NodeId, spec: AgentSpec) -> None:
        """Tell an agent what to do, whose driver has died before, and adopt it."""
        if (actor := self._actors.get(node)) is not None:
            actor.begin.remote(serialization.dump_spec(spec))
            self._ask_to_obey(node, spec.link_address)

    def _ask_to_obey(self, node: NodeId, link: SecretAddress | None) -> None:
        answer = self._actors[node].adopt.remote(self._epoch, link)
        answer.future().add_done_callback(partial(self._answered, node))

    def _answered(self, node: NodeId, future: Any) -> None:
        self._adopted(node, future)
        if node in self._awaited:
            self._awaited.discard(node)
            if not self._awaited:
                self.tell(AgentsAdopted())

    def _adopted(self, node: NodeId, future: Any) -> None:
        found: Adoption
        try:
            found, message = future.result()
            report = serialization.load_report(message) if message else AgentReport(sent_at=NodeTime(0.0))
        except Exception as error:  # noqa: BLE001
            self._gone(node, error)
            return
        if not found.has_begun:
            self._begin_again(node)
            return
        goal = self._goals.take_over(node, found.goal)
        self._unadopted.discard(node)
        if found.is_over:
            self.tell(AgentLost(node=node, why="nothing was heard of the driver for too long"))
            return
        self.tell(AgentAdopted(node=node, goal=goal, report=report, at=time.monotonic()))
        self._listen(node)

    # What single agents are asked for.

    def end_node(self, node: NodeId, *, frees_memory: bool) -> Callable[[], None]:
        """Let an agent end its node: Ray, which kills it, would kill the subreaper first. Return what waits for that.

        It waits until some seconds from now, so agents that are asked at the same time are awaited together.
        """
        if (actor := self._actors.get(node)) is None:
            return lambda: None
        ended = (actor.close if frees_memory else actor.leave).remote(self._epoch)
        until = time.monotonic() + _END_NODE_SECONDS

        def wait() -> None:
            ray.wait([ended], timeout=max(0.0, until - time.monotonic()))

        return wait

    def ask(self, node: NodeId, method: str, *arguments: object) -> Future[Any]:
        """Call a method of the actor. The future gets the answer, or LookupError or ClusterError."""
        answer: Future[Any] = Future()

        def heard(future: Any) -> None:
            try:
                answer.set_result(future.result())
            except LookupError as error:
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001
                answer.set_exception(ClusterError(actor_errors.summary(error)))

        if (actor := self._actors.get(node)) is None:
            answer.set_exception(LookupError("it has no agent any more"))
        else:
            getattr(actor, method).options(name=TITLE).remote(*arguments).future().add_done_callback(heard)
        return answer

    # The end.

    def end(self, request: StopAgent) -> None:
        """Kill an agent. In a detached run it ends itself, if this driver is in command: Ray would kill it anyhow."""
        actor = self._actors.pop(request.node, None)
        if actor is not None and self._leave is not None and not request.never_started:
            actor.leave.remote(self._epoch)
        elif actor is not None:
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor)
        if request.why:
            self.tell(AgentLost(node=request.node, why=request.why))

    def hand_over(self, nodes: Collection[NodeId]) -> dict[NodeId, Any]:
        """Return the actors of these nodes, which are no agents of this run any more."""
        return {node: self._actors.pop(node) for node in nodes}


class WorkQueue:
    """Makes calls that may wait for Ray, one after the other, in a thread of its own.

    Each is repeated while the head does not answer. If the head is gone for good, `GcsMonitor` reports that.
    """

    def __init__(
        self, idle_seconds: Callable[[], float], tick: Callable[[], Any], failed: Callable[[ClusterError], None]
    ) -> None:
        """`tick` is called in the thread when nothing was put for `idle_seconds()`, or for a second.

        `failed` takes the error after which the thread makes no more calls.
        """
        self._idle_seconds = idle_seconds
        self._tick = tick
        self._failed = failed
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="raylaunch-fleet")

    def put(self, call: Callable[[], Any]) -> None:
        """Make this call after all others. Any thread may put one."""
        self._calls.put(call)

    def run_pending(self) -> None:
        """Make the calls that were put so far in the caller's thread, before `start`. Raises their errors."""
        for _ in range(self._calls.qsize()):
            self._calls.get()()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def pause(self, seconds: float) -> None:
        """Wait, in a call; not longer than until `close`."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Make no more calls. Waits for the present one, for seconds at most."""
        self._closed.set()
        self._calls.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    call = self._calls.get(timeout=min(LOOK_SECONDS, self._idle_seconds()))
                except queue.Empty:
                    self._tick()
                else:
                    self._retry(call)
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
            self._failed(ClusterError(f"no more nodes can be asked for: {why}"))

    def _retry(self, call: Callable[[], Any]) -> None:
        until = time.monotonic() + _ASK_SECONDS
        while not self._closed.is_set():
            try:
                call()
            except AuthenticationError:  # of a head that was started anew: nothing more is to be had of it
                self._closed.wait()
            except (RayError, RuntimeError):
                if time.monotonic() >= until:
                    raise
                self._closed.wait(LOOK_SECONDS)
            else:
                return


class HostAddresses:
    """The addresses of hosts, for which Ray is asked when a host is new."""

    def __init__(self, only: str | None) -> None:
        """`only`: the address of all hosts; None: each has its own."""
        self._only = only
        self._known: dict[HostId, str] = {}

    def of(self, host: HostId) -> str:
        """Return the address of a host; `""`: Ray knows none."""
        if self._only:
            return self._only
        if host not in self._known:
            self._known = {HostId(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
        return self._known.get(host, "")


class RayFleet(FleetBase):
    """The agents of a run on a cluster. Requests to Ray are made in a thread, in order, because Ray may block."""

    def __init__(
        self,
        plan: Plan,
        spec: AgentSpec,
        say: Callable[[str], None],
        epoch: int = 0,
        leave: Callable[[str], None] | None = None,
        allocator: Allocator | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        """`say` takes a line for a person, in the thread that calls the fleet.

        `epoch` and `leave`: of a driver of a detached run; `leave` ends this process, since another driver is in
        command, and takes the reason. `allocator`: of the driver before, whose agents this one adopts. `reservations`:
        None: placement groups of the run's own.
        """
        setup = _SETUP_SECONDS if ray.get_runtime_context().runtime_env else 0.0
        super().__init__(plan, spec, say, start_timeout=_START_SECONDS + setup, allocator=allocator)
        self._takes_over = allocator is not None
        self._placement_groups = reservations or PlacementGroups(spread=plan.spread, token=spec.token)
        self.agents = RayAgents(
            epoch or spec.epoch,
            leave,
            self._started,
            lambda node: self.to_do.put(partial(self._begin_again, node)),
        )

        def failed(error: ClusterError) -> None:
            self._tell(FleetFailed(error=error))

        self.to_do = WorkQueue(self._idle_seconds, self._tick, failed)
        self._agent_reuse: AgentReuse | None = None
        if spec.job.keep_warm:
            self._agent_reuse = AgentReuse(
                self._placement_groups.options, self.agents.start, self.agents.take, self.to_do.put
            )
        self._addresses = HostAddresses(spec.address)
        #: The host of this process.
        self.here = NO_HOST
        self._drains = gcs_monitor.DrainMonitor(self._drained)
        self.head = GcsMonitor(self._head_answers, failed)

    def start(self, tell: Tell) -> None:
        """Reserve the gang; or, after another driver, adopt its agents and go on with its reservations.

        Each agent starts as soon as its slot is granted. Raises ClusterError where Ray refuses.
        """
        self._tell = self.agents.tell = tell
        self.here = HostId(ray.get_runtime_context().get_node_id())
        if self._takes_over:
            self._take_over()
        else:
            self._reserve()
        self.to_do.start()
        self._drains.start()
        self.head.start()

    def _reserve(self) -> None:
        self._decide(self._allocator.start)
        try:
            self.to_do.run_pending()  # here, so that whoever asked hears what is wrong with it
        except RayError as error:
            raise ClusterError(f"no nodes can be asked for: {actor_errors.summary(error)}") from error

    # After another driver.

    def _take_over(self) -> None:
        """Command all agents that a slot still has, end the others, and do what the last driver had not come to."""
        assert isinstance(self._placement_groups, PlacementGroups)  # who gives a group is no detached run
        self._placement_groups.restore()
        actors: dict[NodeId, Any] = {}
        for name, node in named_resources.agents(self._spec.token).items():
            actor = named_resources.actor(name)
            if actor is None:
                continue  # it has just died
            if NodeId(node) in actors or self._allocator.slots.of(NodeId(node)) is None:
                ray.kill(actor)
            else:
                actors[NodeId(node)] = actor
        awaited = [node for node in actors if self._allocator.slots.is_up(node)]
        self.agents.adopt(actors, awaited, self._spec.link_address)
        groups = self._placement_groups.slots
        with self._lock:
            for request in self._allocator.slots.unfinished({slot for group in groups for slot in group}, actors):
                self._put(request)
        self.to_do.put(partial(self._look_at_hosts, [min(group) for group in groups]))

    def _begin_again(self, node: NodeId) -> None:
        """Start and adopt an agent whose driver died before it had told the agent to begin. In the thread."""
        with self._lock:
            slots = self._allocator.slots
            slot = slots.of(node)
            if slot is None:
                return
            request = slots.start_of(slot)
        self.agents.begin(node, self._spec_for(request))

    def _look_at_hosts(self, granted: Sequence[int]) -> None:
        """Tell of agents that are gone, and wait for the groups of these slots to be granted. In the thread."""
        lost = [node for node in self._allocator.slots.up_nodes() if node not in self.agents]
        alive = {str(each["NodeID"]) for each in ray.nodes() if each["Alive"]}
        for node in lost:
            is_host_dead = self._allocator.slots.host_of(node) not in alive
            why = "its host died" if is_host_dead else "its agent died"
            self._tell(AgentLost(node=node, why=why, is_host_dead=is_host_dead))
        for slot in granted:
            self._watch(slot)

    @contextlib.contextmanager
    def allocator(self) -> Iterator[Allocator]:
        """Yield the allocator. While the block lasts, its slots do not change."""
        with self._lock:
            yield self._allocator

    # Agents.

    def send(self, node: NodeId, order: Order) -> None:
        """Show the actor its goal."""
        self.agents.send(node, order)

    def _started(self, node: NodeId) -> None:
        with self._lock:
            self._allocator.reported(node)

    def _drained(self, hosts: Collection[HostId], notices: Sequence[HostDraining]) -> None:
        for notice in notices:
            self._tell(replace(notice, ours=notice.host == self.here))
        self.to_do.put(partial(self._decide, partial(self._allocator.draining, hosts)))

    # Which nodes there are.

    def release(self, node: NodeId, *, frees_memory: bool = False) -> None:
        """End the agent, or kill it if it does not end itself, and reserve another slot.

        `frees_memory`: the agent ends all before; else the subreaper holds it for a minute, for another agent.
        """
        self.to_do.put(self.agents.end_node(node, frees_memory=frees_memory))
        self._decide(partial(self._allocator.lost, node))

    def replace(self, gone: AgentLost) -> None:
        """Start another agent in the slot; where agents are spread, reserve another slot too."""
        never_came_up = gone.node in self.agents and not self._allocator.slots.is_up(gone.node)
        host = self._allocator.slots.host_of(gone.node)
        pause = self._decide(partial(self._allocator.lost, gone.node, silent=gone.silent))
        has_raised = actor_errors.is_raised_at_start(gone.error)
        if never_came_up and self._allocator.cannot_start(has_raised=has_raised):
            raise actor_errors.cannot_start(gone, self._addresses.of(host) if host else "")
        if pause:
            where = f"on {self._addresses.of(host) or host}" if host else "at its place"
            self._say(f"agents die one after the other {where}: the next is started in {count(pause, 'second')}")

    # What is done about it, in the thread.

    def _put(self, request: Request) -> None:
        self.to_do.put(partial(self._do, request))

    def _tick(self) -> None:
        if self._agent_reuse is not None:
            self._agent_reuse.check_deadlines(time.monotonic())
        self._decide(self._allocator.tick)

    def _head_answers(self) -> None:
        self._drains.check()
        with self._lock:
            astray = self._allocator.slots.may_gang_have_moved()
        if astray:
            self.to_do.put(self._find_moved_gang)

    def _find_moved_gang(self) -> None:
        with contextlib.suppress(RayError, RuntimeError):  # the head does not answer; it is asked again
            self._decide(partial(self._allocator.moved, self._placement_groups.gang_hosts()))

    def _do(self, request: Request) -> None:
        match request:
            case ReserveGang():
                self._placement_groups.reserve_gang(request.bundles)
                self._watch(next(iter(request.bundles)))
            case ReserveSlot():
                if request.avoid and not ray_internals.has_label_selectors():
                    self.to_do.pause(LOOK_SECONDS)  # the last one may have been granted on a host to avoid
                self._placement_groups.reserve(request.slot, request.bundle, request.avoid)
                self._watch(request.slot)
            case StartAgent():
                spec = self._spec_for(request)
                if self._agent_reuse is not None:
                    self._agent_reuse.start(request, spec)
                else:
                    self.agents.start(request, spec, self._placement_groups.options(request.slot, request.bundle))
            case AnnounceNode():
                address = self._addresses.of(request.host)
                self._tell(SlotGranted(node=request.node, host=request.host, address=address))
            case StopAgent():
                if self._agent_reuse is not None:
                    self._agent_reuse.stopped(request.node)
                self.agents.end(request)
            case ReleaseSlot():
                self._placement_groups.release(request.slot)

    def _watch(self, slot: int) -> None:
        self._placement_groups.when_granted(slot, lambda: self.to_do.put(partial(self._granted, slot)))

    def _granted(self, slot: int) -> None:
        hosts = self._placement_groups.hosts(slot)
        self._decide(partial(self._allocator.granted, hosts))
        if self._agent_reuse is not None:  # after what follows of the grant: some may not be wanted there
            self.to_do.put(partial(self._agent_reuse.granted, hosts))

    # What single agents are asked for.

    def logs(self, node: NodeId, asked: LogQuery | LogRead) -> Future[LogAnswer]:
        """Ask the actor."""
        return self.agents.ask(node, "logs", asked)

    def read_result(self, node: NodeId, rank: int, offset: int) -> Future[bytes]:
        """Ask the actor. Ray moves each part through the object stores of both hosts."""
        return self.agents.ask(node, "read_result", rank, offset)

    def ask(self, capability: str, node: NodeId) -> Future[bytes]:
        """Ask the actor."""
        return self.agents.ask(node, "ask", capability)

    # The end.

    def make_idle(self) -> None:
        """Leave agents that are alive, on hosts that are not draining, to the next run, where `keep_warm` is set."""
        if self._agent_reuse is None:
            return
        self._stop()
        staying = [
            node
            for node in self.agents
            if self._allocator.is_on_usable_host(node) and self._agent_reuse.can_be_idle(node)
        ]
        self._agent_reuse.make_idle(self.agents.hand_over(staying), self._spec.job.keep_warm)

    def close(self) -> None:
        """Make each agent end its processes, for seconds at most; then kill it and return what was reserved.

        In a detached run their own processes, and what was reserved, stay until the driver has written the result,
        since they keep the ledger: see `named_resources.remove_nodes`.
        """
        self._stop()
        if self._agent_reuse is not None:
            self._agent_reuse.close()
        actors = self.agents.hand_over([*self.agents])
        close([actor for node, actor in actors.items() if self._allocator.slots.is_up(node)])
        if not self._spec.token:
            kill(list(actors.values()), then=self._placement_groups.cancel)

    def _stop(self) -> None:
        self.head.close()
        self._drains.close()
        self.to_do.close()
