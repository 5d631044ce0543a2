"""Carries out the machine's actions: which order goes to which node, and each attempt's store before its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.core.machine.events_and_actions import (
    Action,
    Cordon,
    Finish,
    ForwardSignal,
    Launch,
    NodeAction,
    Release,
    ReportUnsaved,
    RequestCheckpoint,
    Scale,
    SetTimer,
    Stop,
    Uncordon,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Running, Saving, Starting, Stopping
from raylaunch.core.newtypes import SIGTERM, NodeId, RunTime
from raylaunch.core.placement.environment import Rendezvous, assign
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.node_goal import (
    CommitCheckpoint,
    LaunchWorkers,
    NodeGoal,
    OpenStore,
    Order,
    ProposeCheckpoint,
    SignalWorkers,
    StopWorkers,
)
from raylaunch.node.protocol.node_status import StepProposed, StoreOpened

_STEPS_BEYOND = 2
"""From the furthest worker to the next proposal: a worker asks once a step, so it cannot have gone further by then."""


class Executor:
    """Turns actions into orders to nodes and calls of the fleet. No method waits."""

    def __init__(
        self,
        machine: Machine,
        run_id: str,
        fleet: Fleet,
        watch: ProgressMonitor,
        nodes: NodeRegistry,
    ) -> None:
        self._machine = machine
        self._run_id = run_id
        self._fleet = fleet
        self._watch = watch
        self._nodes = nodes
        #: When the machine's timer is due, in seconds since the run began; infinity: it is not set.
        self.wake_at = float("inf")
        #: Stores by node and attempt; None: ordered, but not open yet.
        self._stores: dict[tuple[NodeId, int], StoreOpened | None] = {}
        #: A launch that waits for its store.
        self._unsent: Launch | None = None
        self._proposal: SyncPoint | None = None

    def perform(self, actions: list[Action], now: RunTime) -> None:
        """Carry out these actions in order."""
        launched = {node for action in actions if isinstance(action, Launch) for node in action.roster}
        for action in actions:
            match action:
                case Launch():
                    self._launch(action)
                case Stop() if action.grace == 0:
                    # Nodes that get a Launch too kill the attempt before anyway: one message, not two.
                    self._to_workers(action, set(action.nodes) - launched, now)
                case Stop() | RequestCheckpoint() | ForwardSignal():
                    self._to_workers(action, action.nodes, now)
                case Release() | Cordon() | Uncordon() | Scale():
                    self._to_hosts(action)
                case SetTimer():
                    self.wake_at = action.at
                case ReportUnsaved() | Finish():
                    pass  # of the first, the driver tells after what the observer tells of this step

    def _to_workers(
        self, action: Stop | RequestCheckpoint | ForwardSignal, nodes: Iterable[NodeId], now: RunTime
    ) -> None:
        match action:
            case Stop():
                for node in nodes:
                    self._fleet.send(
                        node, StopWorkers(attempt=action.attempt, grace=action.grace, signal=action.signal)
                    )
            case RequestCheckpoint():
                step, expected = self._watch.step_ahead(now), self._watch.calls_should_checkpoint
                order = ProposeCheckpoint(attempt=action.attempt, step=step, expected=expected)
                self._proposal = SyncPoint(self._fleet.send, nodes, order)
            case ForwardSignal():
                for node in nodes:
                    self._fleet.send(node, SignalWorkers(attempt=action.attempt, signal=action.signal))

    def _to_hosts(self, action: NodeAction) -> None:
        match action:
            case Release():
                # Its link would end it before it has freed its memory.
                self._nodes.give_up(action.node, ends=not action.frees_memory)
                self._fleet.release(action.node, frees_memory=action.frees_memory)
            case Cordon():
                self._fleet.cordon(action.host)
            case Uncordon():
                self._fleet.uncordon(action.host)
            case Scale():
                self._fleet.scale(action.nodes)

    def resume(self, goals: Mapping[NodeId, NodeGoal]) -> int:
        """Go on after another driver, which has shown nodes these goals. What only some were told, tell all.

        Returns the newest attempt of which nodes were told; 0: none.
        """
        newest = self._newest_attempt(goals)
        orders = {node: [order for _, order in goal.orders] for node, goal in goals.items()}
        for node, goal in goals.items():
            self.resume_node(node, goal)
        if self._goes_on and newest <= self._machine.attempt:  # else another attempt follows at once
            self._resume_launch(orders)
            if isinstance(self._machine.state, Saving):
                self._resume_saving(orders)
        return newest

    @property
    def _goes_on(self) -> bool:
        """Whether the present attempt goes on, and is not being stopped."""
        return isinstance(self._machine.state, Starting | Running | Saving)

    def _resume_launch(self, orders: Mapping[NodeId, Sequence[Order]]) -> None:
        """Tell the rest of the nodes of the present attempt."""
        world = self._machine.world
        launches = [one for known in orders.values() for one in known if isinstance(one, LaunchWorkers)]
        told = {one.assignment.node: one for one in launches if one.attempt == world.attempt}
        if not told and world.unfinished <= orders.keys():
            self._launch(Launch(attempt=world.attempt, roster=world.roster, why="", staying=world.staying))
        for part in assign(world.attempt, world.members) if told else ():
            node = part.node
            if node not in world.unfinished & orders.keys():
                continue
            if node not in told:
                order = replace(next(iter(told.values())), assignment=part, staying=node in world.staying)
                self._fleet.send(node, order)

    def resume_node(self, node: NodeId, goal: NodeGoal) -> None:
        """Take what a node was told as known, and end what it should not run."""
        for _, order in goal.orders:
            if isinstance(order, OpenStore):
                self._stores.setdefault((node, order.attempt), None)
        self._stop_rest(node, goal)

    def _stop_rest(self, node: NodeId, goal: NodeGoal) -> None:
        """Stop the newest workers of a node if they should have been told to end, and were not."""
        state, world, launched = self._machine.state, self._machine.world, _last_attempt(goal)
        is_present = launched == world.attempt and node in world.nodes
        goes_on = launched <= world.attempt and node in world.nodes and self._goes_on
        if not launched or _ends(goal, launched) or goes_on:
            return
        grace, signal = 0.0, SIGTERM
        if is_present and isinstance(state, Stopping):
            grace, signal = max(0.0, state.kill_at - self._machine.now), state.signal
        self._fleet.send(node, StopWorkers(attempt=launched, grace=grace, signal=signal))

    def _resume_saving(self, orders: Mapping[NodeId, Sequence[Order]]) -> None:
        """Go on to look for the step at which all workers save, or have them save at the one that was found."""
        world = self._machine.world
        every = [order for known in orders.values() for order in known]
        proposals = [one for one in every if isinstance(one, ProposeCheckpoint) and one.attempt == world.attempt]
        if not proposals:
            request = RequestCheckpoint(attempt=world.attempt, nodes=world.running_nodes, why="")
            self._to_workers(request, request.nodes, RunTime(self._machine.now))
            return

        def send(node: NodeId, order: Order) -> None:
            if order not in orders.get(node, ()):
                self._fleet.send(node, order)

        last = max(proposals, key=lambda order: order.step)
        self._proposal = SyncPoint(send, world.running_nodes, last)
        if CommitCheckpoint(attempt=last.attempt, step=last.step) in every:
            self._proposal.agree()

    def differs(self, node: NodeId, goal: NodeGoal) -> bool:
        """Return whether a node with this goal was not told what the other nodes of the attempt were."""
        world = self._machine.world
        if not self._goes_on or node not in world.unfinished:
            return _last_attempt(goal) > world.attempt
        return _last_attempt(goal) != world.attempt or _ends(goal, world.attempt)

    def _newest_attempt(self, goals: Mapping[NodeId, NodeGoal]) -> int:
        """Where nodes were told to end an attempt that goes on by the ledger, the next one was to follow."""
        world = self._machine.world
        newest = max(map(_last_attempt, goals.values()), default=0)
        if self._goes_on and any(_ends(goal, world.attempt) for node, goal in goals.items() if node in world.nodes):
            return max(newest, world.attempt + 1)
        return newest

    def unsaved(self) -> str:
        """Return which ranks had not saved when the time for a checkpoint was over, for a person; `""`: none."""
        return self._watch.unsaved(self._proposal.step) if self._proposal is not None else ""

    def answered(self, answer: StepProposed) -> None:
        """Learn that a node's workers know of the step that was proposed to them."""
        if self._proposal is not None:
            self._proposal.answered(answer)

    def store_open(self, node: NodeId, word: StoreOpened) -> None:
        """Record that a store is open, and send the launch that waits for it."""
        self._stores[node, word.attempt] = word
        if self._unsent is not None and self._needs(self._unsent) == (node, word.attempt):
            self._send(self._unsent, word)

    def store_failed(self, node: NodeId, word: StoreOpened) -> bool:
        """Forget a store that could not be opened. Return whether a launch waits for it.

        If none does, nothing is lost: the store is ordered again when a launch needs it.
        """
        self._stores.pop((node, word.attempt), None)
        return self._unsent is not None and self._needs(self._unsent) == (node, word.attempt)

    def _needs(self, launch: Launch) -> tuple[NodeId, int]:
        """Return node and attempt of the store that a launch needs: the first node has it."""
        return launch.roster[0], launch.attempt

    def _launch(self, launch: Launch) -> None:
        """Send the launch, at once if its store is open, else when it is."""
        store = self._stores.get(self._needs(launch))
        if store is not None:
            self._send(launch, store)
        else:
            self._unsent = launch
            self._order_store(*self._needs(launch))

    def _order_store(self, node: NodeId, attempt: int) -> None:
        """Order a store, once only: a second one for the attempt would close the first."""
        if (node, attempt) not in self._stores:
            self._stores[node, attempt] = None
            self._fleet.send(node, OpenStore(attempt=attempt))

    def _send(self, launch: Launch, store: StoreOpened) -> None:
        """Send one message to each node. Then open the next attempt's store, before it is needed.

        Where all attempts use the same port, the next store can be opened only when this one is not needed any more.
        """
        self._unsent = None
        members = [self._machine.nodes[node] for node in launch.roster if node in self._machine.nodes]
        if len(members) < len(launch.roster):
            return  # one was lost meanwhile: the machine knows that, and decides anew
        meeting = Rendezvous(
            master_addr=store.address or members[0].address,
            master_port=store.port,
            run_id=self._run_id,
            max_restarts=self._machine.job.max_restarts,
            restart_count=self._machine.restarts,
            role=self._machine.job.role,
            signals_to_handle=tuple(self._machine.job.signals_to_handle),
        )
        parts = assign(launch.attempt, members)
        for part in parts:
            order = LaunchWorkers(
                assignment=part,
                rendezvous=meeting,
                staying=part.node in launch.staying,
                has_survivors=bool(launch.staying),
            )
            self._fleet.send(part.node, order)
        self._stores = {key: other for key, other in self._stores.items() if key[1] > launch.attempt}
        if not self._machine.job.master_port:
            self._order_store(launch.roster[0], launch.attempt + 1)


def _last_attempt(goal: NodeGoal) -> int:
    """Return the newest attempt that a node was told to launch; 0: none."""
    return max((order.attempt for _, order in goal.orders if isinstance(order, LaunchWorkers)), default=0)


def _ends(goal: NodeGoal, attempt: int) -> bool:
    """Return whether a node was told to end the workers of an attempt."""
    return any(isinstance(order, StopWorkers) and order.attempt == attempt for _, order in goal.orders)


class SyncPoint:
    """The search for the step at which all workers of an attempt save, without a collective (JAX's term).

    It takes two phases, as two-phase commit does. Prepare: a step a little ahead is proposed to every node, workers
    that come to it wait there, and every node answers how far its workers were when they could first know of the
    proposal. If one had passed the step, a later step is proposed, which no worker can have passed. Commit: otherwise
    all nodes are told to save at that step. Prepare takes one message to each node and back, rarely two.
    """

    def __init__(
        self,
        send: Callable[[NodeId, Order], None],
        nodes: Iterable[NodeId],
        first: ProposeCheckpoint,
    ) -> None:
        """`send` sends an order to a node. `first`: the first proposal."""
        self._send = send
        self._nodes = tuple(nodes)
        self._propose(first)

    @property
    def step(self) -> int:
        """The step that was proposed last."""
        return self._proposed.step

    def _propose(self, proposal: ProposeCheckpoint) -> None:
        self._proposed = proposal
        self._missing = set(self._nodes)
        self._reached = -1
        for node in self._nodes:
            self._send(node, proposal)

    def answered(self, answer: StepProposed) -> None:
        """Take a node's answer. Answers to earlier proposals are ignored."""
        last = self._proposed
        if (answer.attempt, answer.step) != (last.attempt, last.step) or answer.node not in self._missing:
            return
        self._missing.remove(answer.node)
        self._reached = max(self._reached, answer.reached)
        if self._missing:
            return
        if self._reached >= last.step:
            self._propose(replace(last, step=self._reached + _STEPS_BEYOND))
            return
        self.agree()

    def agree(self) -> None:
        """Have all nodes save at the step that was proposed last."""
        self._missing.clear()
        for node in self._nodes:
            self._send(node, CommitCheckpoint(attempt=self._proposed.attempt, step=self._proposed.step))


def port_in_use(node: NodeId, word: StoreOpened, port: int) -> ClusterError:
    """Return the error that a node's store cannot listen at the `master_port` of the job."""
    return ClusterError(
        f"port {port} of {node} ({word.address}) cannot be used as `master_port`: {word.why}",
        hint="set another port, or none: then a free one is found",
    )
