"""A driver of a detached run: it keeps a ledger on agents, with which another driver can go on.

The driver sends each decision to a few agents first, with the ledger, in one message with the orders that follow from
it. Others get their orders after that. A driver that takes over has the newest ledger; each agent tells it the newest
goal that it was shown, and its status. From that the run goes on, as it does from any status. What the last driver had
told only some nodes, the others are told now.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.driver import Driver, Item
from raylaunch.cluster.driver.driver_ledger import DriverLedger
from raylaunch.cluster.driver.executor import last_attempt
from raylaunch.cluster.driver.node_registry import AgentLinks
from raylaunch.cluster.driver.observer import Observer
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet.detached_fleet import DetachedFleet
from raylaunch.cluster.fleet_api import (
    AgentAdopted,
    AgentLost,
    AgentsAdopted,
    HostDraining,
    ReportReceived,
    SlotGranted,
)
from raylaunch.cluster.ray_api import actor_errors
from raylaunch.cluster.succession.agent_session import SUCCESSION_SECONDS
from raylaunch.cluster.takeover import ledger as ledgers
from raylaunch.cluster.takeover.ledger import Ledger, RunFacts, TakeoverFacts
from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.machine.events_and_actions import Action, Event, Finish, Launch, Stop, WorkersStarted
from raylaunch.core.machine.resuming import heard
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.node.linux import processes
from raylaunch.node.protocol.messages import StopWorkers
from raylaunch.node.protocol.node_status import NodeStatus

_SAVE_SECONDS = 0.05
"""A ledger without orders waits so long for others: at the start of a big run many nodes join at the same time."""
_ADOPT_SECONDS = 1.0
"""How long a driver that was replaced leaves its successor to adopt all agents, after it has adopted one."""
_OTHERS_SECONDS = 3.0
"""How long a driver to which the head does not answer waits for reports of other hosts. They come once a second."""
_HEAR_SECONDS = 5.0
"""How long a driver that takes over waits for all agents to tell what is true there, before it decides anything."""


class DetachedDriver(Driver):
    """Sends its orders with `DetachedFleet.flush`, after each batch of what it has heard."""

    def __init__(
        self,
        facts: RunFacts,
        fleet: DetachedFleet,
        folder: RunFolder,
        observer: Observer,
        began: float,
        links: AgentLinks | None = None,
        ledger: Ledger | None = None,
        takeover: TakeoverFacts | None = None,
        is_in_command: Callable[[], bool | None] = lambda: True,
        on_command: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`ledger`: the one with which to begin; None: this is the first driver of the run.

        `is_in_command` and `on_command`: see `Succession`.
        """
        super().__init__(
            facts.job,
            facts.run_id,
            fleet,
            folder,
            observer,
            began,
            links,
            ledger.decisions if ledger is not None else None,
        )
        self._facts = facts
        self._detached = fleet
        self._folder = folder
        #: Until all agents are heard, or have had the time to tell what is true there.
        self._ledger = ledger
        self._takeover = takeover
        self._is_in_command = is_in_command
        self._on_command = on_command
        self._commands = ledger is None
        #: When a node was lost last of which nothing but its silence is known: this host may be cut off.
        self._doubt_at = -float("inf")
        #: Whether there is a launch that waits for an answer of the head.
        self._holds_launch = False
        #: The time.monotonic() at which agents were told to obey this driver.
        self._asked_at = 0.0
        #: Whether there is something that is in no ledger.
        self._is_changed = False
        self._saved_at = 0.0
        #: The agents that have been adopted, and what was heard since, until this driver decides anything.
        self._adopted: dict[NodeId, AgentAdopted] = {}
        self._aside: list[Item] = []
        #: Nodes that were up, and that may be alive though Ray counts their hosts as dead.
        self._unproved: dict[NodeId, HostId] = {}

    def run(self) -> Finish:
        """Run as `Driver` does. At the end, this process ends if another driver may go on with the run."""
        try:
            return super().run()
        finally:
            asked_at = time.monotonic()
            known = self._is_in_command()
            if known is False:
                self._folder.fence.leave("another driver has taken over, or Ray starts one, or the run was ended")
            if known is None and (not self._commands or self._is_cut_off(asked_at)):
                self._folder.fence.leave("it reaches neither the head of the cluster nor agents on other hosts")

    def end_nodes(self) -> None:
        """End all agents that obey no other driver, and will not in a moment. Any thread may call this."""
        time.sleep(_ADOPT_SECONDS)
        for node in self.nodes.hosts():
            self.nodes.end(node)

    def _is_cut_off(self, since: float) -> bool:
        """Return whether this host may be cut off, while the head does not answer. Waits for reports of other hosts."""
        if self._is_in_doubt:
            return True
        here = self._detached.here
        others = [node for node, host in self.nodes.hosts().items() if host != here]
        while others and not any(self.nodes.last_heard(node) > since for node in others):
            if time.monotonic() > since + _OTHERS_SECONDS:
                return True
            time.sleep(_SAVE_SECONDS)
        return False

    @property
    def _is_in_doubt(self) -> bool:
        """Whether nodes were lost that may rather be on the other side of a network that is cut."""
        return self._doubt_at >= self._detached.head_answered_at

    def _take_command(self) -> None:
        if not self._commands:
            self._commands = True
            self._folder.take_command()
            self._on_command(self._folder.where)

    # The beginning of a driver that takes over.

    def _begin(self) -> None:
        if self._ledger is None:
            super()._begin()
            self._detached.flush(self._dumped())
            return
        if self.machine.phase is Phase.DONE:
            self._take_command()
            return  # only the result may not be written
        self.nodes.start(self._inbox.put)
        self._asked_at = time.monotonic()
        hosts = {node: member.host for node, member in self.machine.nodes.items()}
        for node, host in hosts.items():  # its node may go on for so long without any driver
            self.nodes.came_up(node, host, self._asked_at)
            self.nodes.heard(node, self._asked_at + SUCCESSION_SECONDS)
        last = self._ledger.host if self._takeover is not None and self._takeover.is_driver_gone else None
        self._unproved = {node: host for node, host in hosts.items() if host != last}
        self._fleet.start(self._tell)

    def _events(self, item: Item) -> Iterator[Event]:
        if isinstance(item, LinkDown) and item.is_replaced:
            self._folder.fence.leave(f"{item.node} obeys another driver")
        if isinstance(item, AgentAdopted):
            self._take_command()
        if self._ledger is None:
            yield from self._present_events(item)
        elif isinstance(item, AgentAdopted):
            self._adopted[item.node] = item
        elif isinstance(item, AgentsAdopted):
            yield from self._resume()
        else:
            self._aside.append(item)

    def _next_items(self) -> Iterator[Item]:
        if self._ledger is None:
            yield from super()._next_items()
            return
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=max(0.0, self._asked_at + _HEAR_SECONDS - time.monotonic()))

    def _due_events(self) -> Iterator[Event]:
        if self._ledger is None:
            yield from super()._due_events()
        elif time.monotonic() >= self._asked_at + _HEAR_SECONDS:
            yield from self._resume()

    def _resume(self) -> Iterator[Event]:
        """Go on with the run: with what the agents that obey this driver have told, and with what was heard since."""
        self._take_command()
        self._ledger = None
        adopted, aside, self._aside = [*self._adopted.values()], self._aside, []
        self._executor.resume({agent.node: agent.goal for agent in adopted})
        if not self.machine.world.has_progressed:
            self._peers.launched(self._now())
        yield self._replaced(max((last_attempt(agent.goal) for agent in adopted), default=0))
        for agent in adopted:
            yield from self._events(agent)
        for item in aside:
            yield from self._events(item)
        processes.release_memory()  # from here on this process mostly waits

    def _replaced(self, attempt: int) -> DriverReplaced:
        takeover, now = self._takeover, time.monotonic()
        assert takeover is not None
        return DriverReplaced(
            at=self._now(),
            driver=takeover.driver,
            process_seconds=takeover.process_seconds,
            state_seconds=takeover.state_seconds,
            prepare_seconds=self._asked_at - takeover.found_at,
            agents_seconds=now - self._asked_at,
            attempt=attempt,
        )

    def _agent_adopted(self, agent: AgentAdopted) -> Iterator[Event]:
        """Hear of a node from this moment on: it has no minute without a driver any more."""
        node, is_late = agent.node, agent.node not in self._adopted
        self._adopted[node] = agent
        if node in self.machine.nodes:
            self.nodes.heard(node, agent.at)
            self.nodes.came_up(node, self.machine.nodes[node].host, agent.at)
        if is_late:
            self._executor.resume_node(node, agent.goal)
            if self._executor.differs(node, agent.goal):
                why = "the last driver had not told it what it told others"
                yield from self._node_lost(AgentLost(node=node, why=why))
                return
        if (status := agent.report.status) is not None:
            workers = status.workers
            self._statuses[node] = NodeStatus(workers=heard(self.machine.run, node, workers))
            if workers.pids is not None:
                started = WorkersStarted(at=self._now(), attempt=workers.attempt, node=node, pids=workers.pids)
                self.monitor.started(started)
        yield from self._report(ReportReceived(node=node, report=agent.report, at=agent.at))

    # What is heard.

    def _present_events(self, item: Item) -> Iterator[Event]:
        if isinstance(item, AgentAdopted):
            if not self.nodes.is_lost(item.node):
                yield from self._agent_adopted(item)
            return
        if isinstance(item, SlotGranted) and item.node in self.machine.nodes:
            return  # the fleet says again what an earlier driver may not have heard
        if isinstance(item, AgentLost) and self._may_be_alive(item):
            return
        yield from super()._events(item)

    def _step(self, event: Event) -> None:
        self._is_changed = True
        super()._step(event)

    def _host_draining(self, item: HostDraining) -> Iterator[Event]:
        if item.ours:
            self._observer.on_message(
                "the host of the driver is being drained: another driver takes over when it is gone"
            )
        yield from super()._host_draining(replace(item, ours=False))

    def _node_lost(self, gone: AgentLost) -> Iterator[Event]:
        if gone.silent:
            self._doubt_at = time.monotonic()
        yield from super()._node_lost(gone)

    def _may_be_alive(self, gone: AgentLost) -> bool:
        """Return whether Ray may only think that the host is dead; then the node is lost when its lease must be over.

        If the last driver may be alive, its host stands still or is cut off, perhaps with others. If its process has
        ended, a node may have seen that before it was cut off, and go on for a minute, as `_begin` assumes. Only a host
        of which both the driver's process and the raylet have ended is dead.
        """
        host = self._unproved.pop(gone.node, None)
        if host is None or not actor_errors.is_of_dead_host(gone.error) or gone.node in self._adopted:
            return False
        if self._takeover is not None and self._takeover.is_driver_gone:
            return True
        stops_at = time.monotonic() + self._facts.job.node_timeout  # by then that driver has missed the other nodes
        self.nodes.heard(gone.node, stops_at)
        self.nodes.came_up(gone.node, host, stops_at)
        return True

    def _report(self, item: ReportReceived) -> Iterator[Event]:
        self._detached.reported(item.node, item.report.kept)
        self._is_changed |= item.report.status is not None
        yield from super()._report(item)

    # What is decided.

    def _perform(self, actions: list[Action]) -> tuple[Action, ...]:
        if self._is_in_doubt and any(isinstance(action, Launch) for action in actions):
            for stop in [action for action in actions if isinstance(action, Stop)]:
                for node in stop.nodes:  # else the launch would stop its workers
                    self._fleet.send(node, StopWorkers(attempt=stop.attempt, grace=stop.grace, signal=stop.signal))
            self._detached.flush(b"")
            self._holds_launch = True
        return super()._perform(actions)

    def _stepped(self) -> None:
        now = time.monotonic()
        if self._ledger is not None or not (self._is_changed or self._detached.has_unsent):
            return  # nothing was decided yet, or an agent has it
        self._holds_launch &= self._is_in_doubt
        if self._holds_launch:  # on the other side of the cut, another driver may launch
            self._wake_at = self._run_time(now + _SAVE_SECONDS)
            return
        due = self._saved_at + _SAVE_SECONDS
        if now < due and not self._detached.has_unsent and self.machine.phase is not Phase.DONE:
            self._wake_at = self._run_time(due)
            return
        self._wake_at = float("inf")
        self._is_changed, self._saved_at = False, now
        self._detached.flush(self._dumped())

    def _dumped(self) -> bytes:
        """Return the ledger, for `ledger.load`."""
        decisions = DriverLedger(
            run=self.machine.run,
            copies=self._executor.copies.known,
            warned=frozenset(self._warnings.said),
            calls_should_checkpoint=self.monitor.calls_should_checkpoint,
        )
        with self._detached.allocator() as slots:
            return ledgers.dump(
                Ledger(
                    facts=self._facts,
                    decisions=decisions,
                    slots=slots,
                    folder=self._folder.state(),
                    now=self._now(),
                    wall=time.time(),
                    clock=time.monotonic(),
                    host=self._detached.here,
                )
            )
