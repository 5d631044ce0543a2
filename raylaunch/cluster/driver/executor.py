"""Carries out the machine's actions: which order goes to which node, and each attempt's store before its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raylaunch.cluster.driver.copy_ring import CopyRing
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.core.machine.commits import RestoreCommit
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
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import Rendezvous, assign
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.messages import (
    CommitCheckpoint,
    LaunchWorkers,
    OpenStore,
    ProposeCheckpoint,
    SignalWorkers,
    StepProposed,
    StopWorkers,
    StoreOpened,
)

_STEPS_BEYOND = 2
"""From the furthest worker to the next proposal: a worker asks once a step, so it cannot have gone further by then."""


class Executor:
    """Turns actions into orders to nodes and calls of the fleet. No method waits."""

    def __init__(
        self, machine: Machine, run_id: str, fleet: Fleet, watch: ProgressMonitor, give_up: Callable[..., None]
    ) -> None:
        """`give_up` is called for each node that counts as lost from then on, as `NodeRegistry.give_up`."""
        self._machine = machine
        self._run_id = run_id
        self._fleet = fleet
        self._watch = watch
        self._give_up = give_up
        #: When the machine's timer is due, in seconds since the run began; infinity: it is not set.
        self.wake_at = float("inf")
        self.finish: Finish | None = None
        #: Stores by node and attempt; None: ordered, but not open yet.
        self._stores: dict[tuple[NodeId, int], StoreOpened | None] = {}
        #: A launch that waits for its store.
        self._unsent: Launch | None = None
        self._proposal: SyncPoint | None = None
        self.copies = CopyRing(machine, fleet)

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
                case Stop() | RestoreCommit() | RequestCheckpoint() | ForwardSignal():
                    self._to_workers(action, action.nodes, now)
                case Release() | Cordon() | Uncordon() | Scale():
                    self._to_hosts(action)
                case SetTimer():
                    self.wake_at = action.at
                case Finish():
                    self.finish = action
                case ReportUnsaved():
                    pass  # the driver says it, after what the observer says of this step

    def _to_workers(
        self, action: Stop | RestoreCommit | RequestCheckpoint | ForwardSignal, nodes: Iterable[NodeId], now: RunTime
    ) -> None:
        match action:
            case Stop():
                for node in nodes:
                    self._fleet.send(
                        node, StopWorkers(attempt=action.attempt, grace=action.grace, signal=action.signal)
                    )
            case RestoreCommit():
                for node in nodes:
                    self._fleet.send(node, self.copies.announcement(node, action))
            case RequestCheckpoint():
                self.copies.renew()
                step, expected = self._watch.step_ahead(now), self._watch.calls_should_checkpoint
                is_copied = bool(self._machine.leaving)
                self._proposal = SyncPoint(
                    self._fleet, action.attempt, nodes, step, expected=expected, is_copied=is_copied
                )
            case ForwardSignal():
                for node in nodes:
                    self._fleet.send(node, SignalWorkers(attempt=action.attempt, signal=action.signal))

    def _to_hosts(self, action: NodeAction) -> None:
        match action:
            case Release():
                self._give_up(action.node, ends=not action.frees_memory)  # its link would end it before it has freed it
                self._fleet.release(action.node, frees_memory=action.frees_memory)
            case Cordon():
                self._fleet.cordon(action.host)
            case Uncordon():
                self._fleet.uncordon(action.host)
            case Scale():
                self._fleet.scale(action.nodes)

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
        parts, peers = assign(launch.attempt, members), self.copies.peers()
        for part in parts:
            order = LaunchWorkers(
                assignment=part,
                rendezvous=meeting,
                staying=part.node in launch.staying,
                has_survivors=bool(launch.staying),
                awaits_commit=self.copies.has_state,
                peers=peers,
            )
            self._fleet.send(part.node, order)
        self.copies.launched()
        self._watch.begin(parts)
        self._stores = {key: other for key, other in self._stores.items() if key[1] > launch.attempt}
        if not self._machine.job.master_port:
            self._order_store(launch.roster[0], launch.attempt + 1)


class SyncPoint:
    """The search for the step at which all workers of an attempt save, without a collective (JAX's term).

    It takes two phases, as two-phase commit does. Prepare: a step a little ahead is proposed to every node, workers
    that come to it wait there, and every node answers how far its workers were when they could first know of the
    proposal. If one had passed the step, a later step is proposed, which no worker can have passed. Commit: otherwise
    all nodes are told to save at that step. Prepare takes one message to each node and back, rarely two.
    """

    def __init__(
        self,
        fleet: Fleet,
        attempt: int,
        nodes: Iterable[NodeId],
        step: int,
        *,
        expected: bool = False,
        is_copied: bool = False,
    ) -> None:
        """`expected`: workers that have not asked to save yet are expected to do so. `is_copied`: see the order."""
        self._fleet = fleet
        self._attempt, self._nodes = attempt, tuple(nodes)
        self._expected, self._is_copied = expected, is_copied
        self._propose(step)

    def _propose(self, step: int) -> None:
        #: The step that was proposed last.
        self.step = step
        self._missing = set(self._nodes)
        self._reached = -1
        order = ProposeCheckpoint(attempt=self._attempt, step=step, expected=self._expected, is_copied=self._is_copied)
        for node in self._nodes:
            self._fleet.send(node, order)

    def answered(self, answer: StepProposed) -> None:
        """Take a node's answer. Answers to earlier proposals are ignored."""
        if (answer.attempt, answer.step) != (self._attempt, self.step) or answer.node not in self._missing:
            return
        self._missing.remove(answer.node)
        self._reached = max(self._reached, answer.reached)
        if self._missing:
            return
        if self._reached >= self.step:
            self._propose(self._reached + _STEPS_BEYOND)
            return
        for node in self._nodes:
            self._fleet.send(node, CommitCheckpoint(attempt=self._attempt, step=self.step))


def port_in_use(node: NodeId, word: StoreOpened, port: int) -> ClusterError:
    """Return the error that a node's store cannot listen at the `master_port` of the job."""
    return ClusterError(
        f"port {port} of {node} ({word.address}) cannot be used as `master_port`: {word.why}",
        hint="set another port, or none: then a free one is found",
    )
