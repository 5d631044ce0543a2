"""From the machine's orders to messages: who is told what, and a store before everybody is told of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raylaunch.cluster.fleet import Fleet
from raylaunch.cluster.proposal import Proposal
from raylaunch.cluster.watch import Watch
from raylaunch.core.actions import (
    Action,
    AskCheckpoint,
    Finish,
    Forward,
    Launch,
    Readmit,
    Release,
    Shun,
    Stop,
    WakeAt,
)
from raylaunch.core.machine import Machine
from raylaunch.core.ranks import Rendezvous, assign
from raylaunch.node.messages import Proposed, StoreOpen


class Orders:
    """Does what the machine decides, by way of the fleet. Nothing here waits."""

    def __init__(
        self, machine: Machine, run_id: str, fleet: Fleet, watch: Watch, give_up: Callable[[str], None]
    ) -> None:
        """`give_up` is told of each node that is not to be believed any more."""
        self._machine = machine
        self._run_id = run_id
        self._fleet = fleet
        self._watch = watch
        self._give_up = give_up
        #: When the machine wants to be woken, in seconds since the run began; infinity: never.
        self.wake_at = float("inf")
        self.finish: Finish | None = None
        #: Stores by node and attempt; None: asked for, but not open yet.
        self._stores: dict[tuple[str, int], StoreOpen | None] = {}
        #: An attempt that waits for the store of its first node.
        self._unsent: Launch | None = None
        self._proposal: Proposal | None = None

    def perform(self, actions: list[Action], now: float) -> None:
        """All of them, in order."""
        launched = {node for action in actions if isinstance(action, Launch) for node in action.roster}
        for action in actions:
            match action:
                case Launch():
                    self._launch(action)
                case Stop() if action.grace == 0:
                    # Nodes that get a Launch with it end the attempt before anyway: one message, not two.
                    self._to_workers(action, set(action.nodes) - launched, now)
                case Stop() | AskCheckpoint() | Forward():
                    self._to_workers(action, action.nodes, now)
                case Release() | Shun() | Readmit():
                    self._to_hosts(action)
                case WakeAt():
                    self.wake_at = action.at
                case Finish():
                    self.finish = action

    def _to_workers(self, action: Stop | AskCheckpoint | Forward, nodes: Iterable[str], now: float) -> None:
        match action:
            case Stop():
                for node in nodes:
                    self._fleet.stop(node, action.attempt, action.grace, action.signal)
            case AskCheckpoint():
                self._proposal = Proposal(self._fleet, action.attempt, nodes, self._watch.ask_at(now))
            case Forward():
                for node in nodes:
                    self._fleet.forward(node, action.attempt, action.signal)

    def _to_hosts(self, action: Release | Shun | Readmit) -> None:
        match action:
            case Release():
                self._give_up(action.node)
                self._fleet.release(action.node)
            case Shun():
                self._fleet.shun(action.host)
            case Readmit():
                self._fleet.readmit(action.host)

    def unsaved(self) -> str:
        """Who had not saved when the time was over; `""`: there is nothing to be said of it."""
        return self._watch.unsaved(self._proposal.step) if self._proposal is not None else ""

    def proposed(self, word: Proposed) -> None:
        """A node's workers know of the step that was proposed to them."""
        if self._proposal is not None:
            self._proposal.take(word)

    def store_open(self, node: str, word: StoreOpen) -> None:
        """An attempt may have waited for it."""
        self._stores[node, word.attempt] = word
        if self._unsent is not None and self._needs(self._unsent) == (node, word.attempt):
            self._send(self._unsent, word)

    def _needs(self, launch: Launch) -> tuple[str, int]:
        """The store that an attempt waits for: on its first node."""
        return launch.roster[0], launch.attempt

    def _launch(self, launch: Launch) -> None:
        """Send it at once where the store is open; else when it is."""
        store = self._stores.get(self._needs(launch))
        if store is not None:
            self._send(launch, store)
        else:
            self._unsent = launch
            self._ask_store(*self._needs(launch))

    def _ask_store(self, node: str, attempt: int) -> None:
        """Once only: a second store for the attempt would close the first."""
        if (node, attempt) not in self._stores:
            self._stores[node, attempt] = None
            self._fleet.open_store(node, attempt)

    def _send(self, launch: Launch, store: StoreOpen) -> None:
        """One message to each node; then have the next attempt's store opened, before it is needed.

        Where all attempts use the same port, the next store can only be opened when this one is no longer needed.
        """
        self._unsent = None
        members = [self._machine.nodes[node] for node in launch.roster if node in self._machine.nodes]
        if len(members) < len(launch.roster):
            return  # one was lost meanwhile; the machine knows and will decide anew
        meeting = Rendezvous(
            master_addr=store.address or members[0].address,
            master_port=store.port,
            run_id=self._run_id,
            max_restarts=self._machine.job.max_restarts,
            restart_count=self._machine.restarts,
            role=self._machine.job.role,
            signals_to_handle=tuple(self._machine.job.signals_to_handle),
            virtual_local_rank=self._machine.job.virtual_local_rank,
        )
        parts = assign(launch.attempt, members)
        for part in parts:
            self._fleet.launch(part.node, part, meeting)
        self._watch.begin(parts)
        self._stores = {key: other for key, other in self._stores.items() if key[1] > launch.attempt}
        if not self._machine.job.master_port:
            self._ask_store(launch.roster[0], launch.attempt + 1)
