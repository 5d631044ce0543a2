"""A driver that keeps copies of its state on agents, so that another driver can continue its run.

The driver sends each decision to a few agents first, in one message with the orders that follow from it. Others get
their orders after that. So the kept state contains every order that an agent has obeyed. The driver acknowledges a
report only when a kept state contains its consequences. A driver that starts from the newest state therefore receives
all later reports again, sends again all orders that may have been lost, and decides as the last driver would have.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raylaunch.cluster.agent.agent import AgentSpec
from raylaunch.cluster.agent.lease import end_this_process
from raylaunch.cluster.agent.link import LinkDown
from raylaunch.cluster.driver.driver import Driver, Item
from raylaunch.cluster.driver.node_registry import AgentLinks
from raylaunch.cluster.driver.observer import Observer
from raylaunch.cluster.driver.request_desk import RequestDesk
from raylaunch.cluster.driver.run_folder import FolderState, RunFolder
from raylaunch.cluster.fleet.detached_fleet import DetachedFleet, FleetState
from raylaunch.cluster.fleet_api import AgentLost, AgentsAdopted, HostDraining, ReportReceived, SlotGranted
from raylaunch.cluster.ray_api import actor_errors
from raylaunch.cluster.succession.agent_session import SUCCESSION_SECONDS
from raylaunch.core.driver_replaced import DriverReplaced
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Event
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.plan import Plan
from raylaunch.node.linux import processes

_SAVE_SECONDS = 0.05
"""A state without orders waits so long for others: at the start of a big run many nodes join at the same time."""
_HEAR_SECONDS = 5.0
"""After a takeover no deadline is enforced for so long, until all agents have told what is true now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change in a run, as far as a driver needs it."""

    request: bytes
    """The `DetachedRun`, and what runs it, pickled."""
    asked: Job
    job: Job
    """As it was asked for, and with the numbers that the plan has for it."""
    plan: Plan
    run_id: str
    began: str
    """The time of day, in ISO 8601."""
    spec: AgentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """All that another driver needs to go on with a run."""

    facts: RunFacts
    parts: bytes
    """The machine and what else has a state in the driver, pickled by `_StatePickler`."""
    hosts: dict[NodeId, HostId]
    """Of the nodes that are up."""
    lost: tuple[NodeId, ...]
    fleet: FleetState
    folder: FolderState
    now: float
    """Seconds since the run began."""
    wall: float
    clock: float
    """`time.time()` and `time.monotonic()` at that moment."""
    is_driver_gone: bool = False
    """Whether an agent has seen the end of that driver's process. The driver that takes over sets it."""

    def clock_shift(self) -> float:
        """Return what to add to a time.monotonic() of that driver's host to have it as one of this host."""
        return time.monotonic() - self.clock - (time.time() - self.wall)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverFacts:
    """What a driver that takes over knows of the time before it."""

    driver: int
    process_seconds: float
    state_seconds: float
    """See `DriverReplaced`."""
    found_at: float
    """The time.monotonic() at which it had the state."""


def load(state: bytes) -> DriverState:
    """Return the state that these bytes are. They are pickles: only agents of the run have them."""
    found: DriverState = pickle.loads(state)  # noqa: S301
    return found


class DetachedDriver(Driver):
    """Sends its orders with `DetachedFleet.flush`, after each batch of what it has heard."""

    _PARTS = (
        *("machine", "_executor", "_monitor", "_peers"),
        *("_draining", "_shown_warnings", "_interface_warnings"),
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
    ) -> None:
        """`taken`: the state with which to begin; None: this is the first driver of the run.

        `seal` encrypts the states that agents keep.
        """
        super().__init__(facts.job, facts.run_id, fleet, folder, observer, began, links)
        self._facts = facts
        self._detached = fleet
        self._folder = folder
        self._taken = taken
        self._takeover = takeover
        self._seal = seal
        #: The time.monotonic() at which agents were told to obey this driver.
        self._asked_at = 0.0
        #: Whether there is something that no agent keeps.
        self._is_changed = False
        self._saved_at = 0.0
        #: Nodes of which nothing was heard since the takeover, and until when they are awaited.
        self._unheard: set[NodeId] = set()
        self._hear_until = 0.0
        #: Nodes that were up, if the last driver may be alive.
        self._unproved: dict[NodeId, HostId] = {}
        #: Those of its parts that are not in the state.
        self._context = {"driver": self, "fleet": fleet, "folder": folder, "observer": observer, "nodes": self.nodes}
        if taken is not None:
            vars(self).update(_StateUnpickler(io.BytesIO(taken.parts), self._context).load())
            later = taken.clock_shift()
            self._draining = {host: replace(it, deadline=it.deadline + later) for host, it in self._draining.items()}
            self.requests = RequestDesk(self.machine, self._monitor, fleet.send, self._inbox.put)

    def _begin(self) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            super()._begin()
            self._detached.flush(self.state())
            return
        if self.machine.phase is Phase.DONE:
            return  # only the result may not be written
        self.nodes.start(self._inbox.put)
        for node in taken.lost:
            self.nodes.give_up(node)
        self._asked_at = time.monotonic()
        for node, host in taken.hosts.items():  # its node may go on for so long without any driver
            self.nodes.came_up(node, host, self._asked_at)
            self.nodes.heard(node, self._asked_at + SUCCESSION_SECONDS)
        self._unproved = {} if taken.is_driver_gone else dict(taken.hosts)
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
            end_this_process()
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

        It was the host of the last driver, perhaps, which stands still or is cut off: no link proves anything of it.
        """
        host = self._unproved.pop(gone.node, None)
        if host is None or not actor_errors.is_of_dead_host(gone.error) or gone.node in self._detached.heard:
            return False
        stops_at = time.monotonic() + self._facts.job.node_timeout  # by then that driver has missed the other nodes
        self.nodes.heard(gone.node, stops_at)
        self.nodes.came_up(gone.node, host, stops_at)
        return True

    def _report(self, item: ReportReceived) -> Iterator[Event]:
        is_new = self._detached.is_new(item.node, item.report)
        self._is_changed |= bool(item.report.events)
        yield from super()._report(item if is_new else replace(item, report=replace(item.report, events=[])))

    def _stepped(self) -> None:
        now = time.monotonic()
        if not (self._is_changed or self._detached.has_unsent):
            return
        if self._is_hearing() and not self._detached.has_unsent:
            return  # nothing was decided yet, and the agents keep what the last driver knew
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
        _StatePickler(file, self._context).dump({name: getattr(self, name) for name in self._PARTS})
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
            )
            return pickle.dumps(found)


class _StatePickler(pickle.Pickler):
    """Leaves out what the next driver makes anew: it is pickled by name."""

    def __init__(self, file: io.BytesIO, context: Mapping[str, object]) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in context.items()}

    def persistent_id(self, obj: object) -> str | None:
        return self._names.get(id(obj))


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, context: Mapping[str, object]) -> None:
        super().__init__(file)
        self._context = context

    def persistent_load(self, pid: Any) -> object:
        return self._context[pid]
