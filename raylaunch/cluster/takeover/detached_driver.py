"""A driver that keeps copies of its state on agents, so that another driver can continue its run.

The driver sends each decision to a few agents first, in one message with the orders that follow from it. Others get
their orders after that. So the kept state contains every order that an agent has obeyed, and the status of each node on
which these orders are based. A driver that starts from the newest state is told what is true on each node now, shows
again to each node its goal, and decides as the last driver would have.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.driver import Driver, Item
from raylaunch.cluster.driver.node_registry import AgentLinks
from raylaunch.cluster.driver.observer import Observer
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet.detached_fleet import DetachedFleet
from raylaunch.cluster.fleet_api import (
    AgentLost,
    AgentsAdopted,
    CommandTaken,
    HostDraining,
    ReportReceived,
    SlotGranted,
)
from raylaunch.cluster.ray_api import actor_errors
from raylaunch.cluster.succession.agent_session import SUCCESSION_SECONDS
from raylaunch.cluster.takeover.driver_state import (
    DriverState,
    RunFacts,
    StatePickler,
    StateUnpickler,
    TakeoverFacts,
)
from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.machine.events_and_actions import Action, Event, Finish, Launch, Stop
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.node.linux import processes
from raylaunch.node.protocol.messages import StopWorkers

_SAVE_SECONDS = 0.05
"""A state without orders waits so long for others: at the start of a big run many nodes join at the same time."""
_ADOPT_SECONDS = 1.0
"""How long a driver that was replaced leaves its successor to adopt all agents, after it has adopted one."""
_OTHERS_SECONDS = 3.0
"""How long a driver to which the head does not answer waits for reports of other hosts. They come once a second."""
_HEAR_SECONDS = 5.0
"""After a takeover no deadline is enforced for so long, until all agents have told what is true now."""


class DetachedDriver(Driver):
    """Sends its orders with `DetachedFleet.flush`, after each batch of what it has heard."""

    _PARTS = (
        *("machine", "_executor", "monitor", "_peers"),
        *("_draining", "_statuses", "_warnings"),
    )

    def __init__(
        self,
        facts: RunFacts,
        fleet: DetachedFleet,
        folder: RunFolder,
        observer: Observer,
        began: float,
        links: AgentLinks | None = None,
        taken: DriverState | None = None,
        takeover: TakeoverFacts | None = None,
        seal: Callable[[bytes], bytes] = bytes,
        is_in_command: Callable[[], bool | None] = lambda: True,
        on_command: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`taken`: the state with which to begin; None: this is the first driver of the run.

        `seal` encrypts the states that agents keep. `is_in_command` and `on_command`: see `Succession`.
        """
        super().__init__(facts.job, facts.run_id, fleet, folder, observer, began, links)
        self._facts = facts
        self._detached = fleet
        self._folder = folder
        self._taken = taken
        self._takeover = takeover
        self._seal = seal
        self._is_in_command = is_in_command
        self._on_command = on_command
        self._commands = taken is None
        #: When a node was lost last of which nothing but its silence is known: this host may be cut off.
        self._doubt_at = -float("inf")
        #: Whether there is a launch that waits for an answer of the head.
        self._holds_launch = False
        #: The time.monotonic() at which agents were told to obey this driver.
        self._asked_at = 0.0
        #: Whether there is something that no agent keeps.
        self._is_changed = False
        self._saved_at = 0.0
        #: Nodes of which nothing was heard since the takeover, and until when they are awaited.
        self._unheard: set[NodeId] = set()
        self._hear_until = 0.0
        #: Nodes that were up, and that may be alive though Ray counts their hosts as dead.
        self._unproved: dict[NodeId, HostId] = {}
        self._is_last_gone = False
        #: Those of its parts that are not in the state.
        self._context = {"driver": self, "fleet": fleet, "folder": folder, "observer": observer, "nodes": self.nodes}
        if taken is not None:
            vars(self).update(StateUnpickler(io.BytesIO(taken.parts), self._context).load())
            later = taken.clock_shift()
            self._draining = {host: replace(it, deadline=it.deadline + later) for host, it in self._draining.items()}

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
        self._commands = True
        self._folder.take_command()
        self._on_command(self._folder.where)

    def _begin(self) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            super()._begin()
            self._detached.flush(self._seal(self.state()))
            return
        if self.machine.phase is Phase.DONE:
            self._take_command()
            return  # only the result may not be written
        self.nodes.start(self._inbox.put)
        for node in taken.lost:
            self.nodes.give_up(node)
        self._asked_at = time.monotonic()
        for node, host in taken.hosts.items():  # its node may go on for so long without any driver
            self.nodes.came_up(node, host, self._asked_at)
            self.nodes.heard(node, self._asked_at + SUCCESSION_SECONDS)
        self._is_last_gone = taken.is_driver_gone
        on_its_host = {node for node, host in taken.hosts.items() if taken.is_driver_gone and host == taken.host}
        self._unproved = {node: host for node, host in taken.hosts.items() if node not in on_its_host}
        self._unheard, self._hear_until = {*taken.hosts}, time.monotonic() + _HEAR_SECONDS
        self._fleet.start(self._tell)
        self._is_changed = True

    def _is_hearing(self) -> bool:
        """Return whether agents may still have to tell what has happened while there was no driver."""
        while self._unheard:  # one is enough: this is called for each item, and there may be a thousand nodes
            node = next(iter(self._unheard))
            if node not in self._detached.heard and not self.nodes.is_lost(node):
                return time.monotonic() < self._hear_until
            self._unheard.remove(node)
        return False

    def _next_items(self) -> Iterator[Item]:
        if not self._is_hearing():
            yield from super()._next_items()
            return
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=max(0.0, self._hear_until - time.monotonic()))

    def _due_events(self) -> Iterator[Event]:
        if not self._is_hearing():
            yield from super()._due_events()

    def _step(self, event: Event) -> None:
        self._is_changed = True
        super()._step(event)

    def _events(self, item: Item) -> Iterator[Event]:
        if isinstance(item, LinkDown) and item.is_replaced:
            self._folder.fence.leave(f"{item.node} obeys another driver")
        if isinstance(item, CommandTaken):
            self._take_command()
        if isinstance(item, AgentsAdopted):
            self._expect_reports()
        if isinstance(item, SlotGranted) and item.node in self.machine.nodes:
            return  # the fleet says again what an earlier driver may not have heard
        if isinstance(item, AgentLost) and self._may_be_alive(item):
            return
        if isinstance(item, AgentsAdopted) and self._takeover is not None:
            yield self._replaced(self._takeover)
            processes.release_memory()  # from here on this process mostly waits
        else:
            yield from super()._events(item)

    def _host_draining(self, item: HostDraining) -> Iterator[Event]:
        if item.ours:
            self._observer.on_message(
                "the host of the driver is being drained: another driver takes over when it is gone"
            )
        yield from super()._host_draining(replace(item, ours=False))

    def _expect_reports(self) -> None:
        """Agents that obey this driver report to it from now on: they have no minute without a driver any more."""
        now = time.monotonic()
        for node in self._detached.adopted:
            if self.nodes.last_heard(node) > now:
                self.nodes.heard(node, now)
                self.nodes.came_up(node, self.nodes.hosts()[node], now)

    def _node_lost(self, gone: AgentLost) -> Iterator[Event]:
        if gone.silent:
            self._doubt_at = time.monotonic()
        yield from super()._node_lost(gone)

    def _perform(self, actions: list[Action]) -> tuple[Action, ...]:
        if self._is_in_doubt and any(isinstance(action, Launch) for action in actions):
            for stop in [action for action in actions if isinstance(action, Stop)]:
                for node in stop.nodes:  # else the launch would stop its workers
                    self._fleet.send(node, StopWorkers(attempt=stop.attempt, grace=stop.grace, signal=stop.signal))
            self._detached.flush(b"")
            self._holds_launch = True
        return super()._perform(actions)

    def _replaced(self, takeover: TakeoverFacts) -> DriverReplaced:
        return DriverReplaced(
            at=self._now(),
            driver=takeover.driver,
            process_seconds=takeover.process_seconds,
            state_seconds=takeover.state_seconds,
            prepare_seconds=self._asked_at - takeover.found_at,
            agents_seconds=time.monotonic() - self._asked_at,
        )

    def _may_be_alive(self, gone: AgentLost) -> bool:
        """Return whether Ray may only think that the host is dead; then the node is lost when its lease must be over.

        If the last driver may be alive, its host stands still or is cut off, perhaps with others. If its process has
        ended, a node may have seen that before it was cut off, and go on for a minute, as `_begin` assumes. Only a host
        of which both the driver's process and the raylet have ended is dead.
        """
        host = self._unproved.pop(gone.node, None)
        if host is None or not actor_errors.is_of_dead_host(gone.error) or gone.node in self._detached.heard:
            return False
        if self._is_last_gone:
            return True
        stops_at = time.monotonic() + self._facts.job.node_timeout  # by then that driver has missed the other nodes
        self.nodes.heard(gone.node, stops_at)
        self.nodes.came_up(gone.node, host, stops_at)
        return True

    def _report(self, item: ReportReceived) -> Iterator[Event]:
        self._detached.reported(item.node, item.report)
        self._is_changed |= item.report.status is not None
        yield from super()._report(item)

    def _stepped(self) -> None:
        now = time.monotonic()
        if not (self._is_changed or self._detached.has_unsent):
            return
        if self._is_hearing() and not self._detached.has_unsent:
            return  # nothing was decided yet, and the agents keep what the last driver knew
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
        self._detached.flush(self._seal(self.state()))

    def state(self) -> bytes:
        """Return the state, for `load`."""
        file = io.BytesIO()
        StatePickler(file, self._context).dump({name: getattr(self, name) for name in self._PARTS})
        with self._detached.locked():
            found = DriverState(
                facts=self._facts,
                parts=file.getvalue(),
                hosts=self.nodes.hosts(),
                lost=self.nodes.lost(),
                fleet=self._detached.state(),
                folder=self._folder.state(),
                now=self._now(),
                wall=time.time(),
                clock=time.monotonic(),
                host=self._detached.here,
            )
            return pickle.dumps(found)
