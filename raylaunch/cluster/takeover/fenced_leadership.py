"""What is different for a driver of a detached run: it keeps a ledger on agents, and others may be in its place.

The driver sends each decision to a few agents first, with the ledger, in one message with the orders that follow from
it. Others get their orders after that. A driver that takes over has the newest ledger; each agent tells it the newest
goal that it was shown, and its status. From that the run goes on, as it does from any status. What the last driver had
told only some nodes, the others are told now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import ray

from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.driver import DriverLedger, Item, Predecessor
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import AgentAdopted, AgentLost, ReportReceived
from raylaunch.cluster.succession import interim_keeper
from raylaunch.cluster.succession.interim_keeper import InterimState
from raylaunch.cluster.takeover import ledger as ledgers
from raylaunch.cluster.takeover.ledger import LastDriver, Ledger, RunFacts
from raylaunch.core.machine.events_and_actions import Action, Launch, Stop
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.node.protocol.node_goal import StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec

_SAVE_SECONDS = 0.05
"""A ledger without orders waits so long for others: at the start of a big run many nodes join at the same time."""
_ADOPT_SECONDS = 1.0
"""How long a driver that was replaced leaves its successor to adopt all agents, after it has adopted one."""
_OTHERS_SECONDS = 3.0
"""How long a driver to which the head does not answer waits for reports of other hosts. They come once a second."""

_MOST_KEEPERS = 3
"""This number of agents keep the ledger: the first that are up, each on another host if possible."""


class LedgerKeepers:
    """Sends the orders of a batch, with the ledger that follows from it."""

    def __init__(self, fleet: RayFleet, spec: AgentSpec, epoch: int) -> None:
        """`spec`: what the agents of the run are told. `epoch`: the driver's epoch."""
        self.fleet = fleet
        self._spec = spec
        self._epoch = epoch
        #: The generation of the last ledger that the interim keeper has; None: it has ended.
        self._interim: int | None = 0
        self._has_other_hosts = sum(node["Alive"] for node in ray.nodes()) > 1

    def flush(self, ledger: bytes) -> None:
        """Send the orders that wait. First those to the agents that also get the ledger, which is about them.

        `ledger`: empty if orders must not wait for it.
        """
        keepers = self._keepers() if ledger else []
        generation = self.fleet.agents.flush(keepers, ledger)
        if ledger and self._needs_interim(keepers):
            self._interim = generation
            found = InterimState(kept=(self._epoch, generation), ledger=ledger)
            keep = partial(interim_keeper.keep, self._spec.token, self._spec.job.driver_timeout, found)
            self.fleet.to_do.put(keep)

    def _keepers(self) -> list[NodeId]:
        here = self.fleet.here
        with self.fleet.slots() as slots:
            hosts = {node: slots.host_of(node) for node in self.fleet.agents.obeying if slots.is_up(node)}
        by_host = {host: node for node, host in reversed(hosts.items())}
        first = [node for host, node in by_host.items() if host != here]
        others = [node for node in hosts if node not in first]
        return [*first, *others][:_MOST_KEEPERS]

    def _needs_interim(self, keepers: Sequence[NodeId]) -> bool:
        """Return whether no agent keeps the ledger, or none that would outlive the host of this process."""
        with self.fleet.slots() as slots:
            return not any(not self._has_other_hosts or slots.host_of(node) != self.fleet.here for node in keepers)

    def reported(self, node: NodeId, generation: int) -> None:
        """Learn that an agent has the ledger of this generation. 0: none of this driver."""
        if self._interim is not None and generation > self._interim and not self._needs_interim([node]):
            self._interim = None
            self.fleet.to_do.put(partial(interim_keeper.end, self._spec.token))


class FencedLeadership:
    """Writes the ledger after each batch of what the driver has heard, and ends this process if it was replaced."""

    def __init__(
        self,
        facts: RunFacts,
        keepers: LedgerKeepers,
        folder: RunFolder,
        predecessor: LastDriver | None = None,
        is_in_command: Callable[[], bool | None] = lambda: True,
        on_command: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`is_in_command` and `on_command`: see `Succession`."""
        self.predecessor: Predecessor | None = predecessor
        self.wake_at = float("inf")
        self._facts = facts
        self._keepers = keepers
        self._folder = folder
        self._is_in_command = is_in_command
        self._on_command = on_command
        self._commands = predecessor is None
        #: When a node was lost last of which nothing but its silence is known: this host may be cut off.
        self._doubt_at = -float("inf")
        #: Whether there is a launch that waits for an answer of the head.
        self._holds_launch = False
        #: How many entries the journal had at the last ledger; None: there is none, or more that is new.
        self._saved = predecessor.ledger.folder.count if predecessor is not None else None
        self._saved_at = 0.0

    @property
    def _is_in_doubt(self) -> bool:
        """Whether nodes were lost that may rather be on the other side of a network that is cut."""
        return self._doubt_at >= self._keepers.fleet.head_answered_at

    def heard(self, item: Item) -> None:
        """Begin to command with the first agent that obeys this driver, and end if one obeys another driver."""
        if isinstance(item, LinkDown) and item.is_replaced:
            self._folder.fence.leave(f"{item.node} obeys another driver")
        if isinstance(item, AgentAdopted):
            self.take_command()
        if isinstance(item, ReportReceived):
            self._keepers.reported(item.node, item.report.kept)
            if item.report.status is not None:
                self._saved = None

    def take_command(self) -> None:
        """Write into the run folder from now on."""
        if not self._commands:
            self._commands = True
            self._folder.take_command()
            self._on_command(self._folder.where)

    def lost(self, gone: AgentLost) -> None:
        """Doubt whether this host is cut off, if only the silence of a node is known."""
        if gone.silent:
            self._doubt_at = time.monotonic()

    def perform(self, actions: Iterable[Action]) -> None:
        """Hold a launch back while this host may be cut off, but stop the workers of the last attempt at once."""
        if not self._is_in_doubt or not any(isinstance(action, Launch) for action in actions):
            return
        for stop in [action for action in actions if isinstance(action, Stop)]:
            for node in stop.nodes:  # else the launch would stop its workers
                self._keepers.fleet.send(node, StopWorkers(attempt=stop.attempt, grace=stop.grace, signal=stop.signal))
        self._keepers.flush(b"")
        self._holds_launch = True

    def stepped(self, decisions: Callable[[], DriverLedger], at: RunTime) -> None:
        """Send orders and ledger, if there is anything new. A ledger without orders waits for others."""
        now, has_orders = time.monotonic(), self._keepers.fleet.agents.has_unsent
        if self._saved == self._folder.count and not has_orders:
            return  # an agent has it
        self._holds_launch &= self._is_in_doubt
        due = self._saved_at + _SAVE_SECONDS
        if self._holds_launch:  # on the other side of the cut, another driver may launch
            self.wake_at = now + _SAVE_SECONDS
            return
        ledger = decisions()
        if now < due and not has_orders and ledger.run.phase is not Phase.DONE:
            self.wake_at = due
            return
        self.wake_at = float("inf")
        self._saved, self._saved_at = self._folder.count, now
        self._keepers.flush(self.dumped(ledger, at))

    def dumped(self, decisions: DriverLedger, at: RunTime) -> bytes:
        """Return the ledger at this time of the run, for `ledger.load`."""
        with self._keepers.fleet.slots() as slots:
            return ledgers.dump(
                Ledger(
                    facts=self._facts,
                    decisions=decisions,
                    slots=slots,
                    folder=self._folder.state(),
                    now=at,
                    wall=time.time(),
                    clock=time.monotonic(),
                    host=self._keepers.fleet.here,
                )
            )

    def ended(self, nodes: NodeRegistry) -> None:
        """End this process if another driver may go on with the run."""
        asked_at = time.monotonic()
        known = self._is_in_command()
        if known is False:
            self._folder.fence.leave("another driver has taken over, or Ray starts one, or the run was ended")
        if known is None and (not self._commands or self._is_cut_off(nodes, asked_at)):
            self._folder.fence.leave("it reaches neither the head of the cluster nor agents on other hosts")

    def _is_cut_off(self, nodes: NodeRegistry, since: float) -> bool:
        """Return whether this host may be cut off, while the head does not answer. Waits for reports of other hosts."""
        if self._is_in_doubt:
            return True
        others = [node for node, host in nodes.hosts().items() if host != self._keepers.fleet.here]
        while others and not any(nodes.last_heard(node) > since for node in others):
            if time.monotonic() > since + _OTHERS_SECONDS:
                return True
            time.sleep(_SAVE_SECONDS)
        return False


def end_nodes(nodes: NodeRegistry) -> None:
    """End all agents that obey no other driver, and will not in a moment. Any thread may call this."""
    time.sleep(_ADOPT_SECONDS)
    for node in nodes.hosts():
        nodes.end(node)
