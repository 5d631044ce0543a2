"""What is different for a driver of a detached run: it keeps a ledger on agents, and others may be in its place.

The driver sends each decision to a few agents first, with the ledger, in one message with the orders that follow from
it. Others get their orders after that. A driver that takes over has the newest ledger; each agent tells it the newest
goal that it was shown, and its status. From that the run goes on, as it does from any status. What the last driver had
told only some nodes, the others are told now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from raylaunch.cluster import named_resources
from raylaunch.cluster.agent.agent_session import Adoption
from raylaunch.cluster.agent.link import LinkDown, LinkServer
from raylaunch.cluster.capability import Capability
from raylaunch.cluster.driver import interim_keeper
from raylaunch.cluster.driver import ledger as ledgers
from raylaunch.cluster.driver.driver import Driver, Item
from raylaunch.cluster.driver.interim_keeper import InterimState
from raylaunch.cluster.driver.ledger import DriverLedger, LastDriver, Ledger, RunFacts
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import AgentAdopted, AgentLost, ReportReceived
from raylaunch.cluster.ray_api import gcs_monitor
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Action, Launch, Stop
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.placement.environment import natural_key
from raylaunch.core.placement.plan import Plan
from raylaunch.core.text import duration, host_list
from raylaunch.node.protocol.node_goal import StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec

_SAVE_SECONDS = 0.05
"""A ledger without orders waits so long for others: at the start of a big run many nodes join at the same time."""
_ADOPT_SECONDS = 1.0
"""How long a driver that was replaced leaves its successor to adopt all agents, after it has adopted one."""
_OTHERS_SECONDS = 3.0
"""How long a driver to which the head does not answer waits for reports of other hosts. They come once a second."""

_LOOK_SECONDS = 2.0
"""How long agents may take to say what they keep."""
_WAIT_SECONDS = 0.3
_HEAD_SECONDS = 2.0
_NOBODY_SECONDS = 30.0
"""How long a driver looks on when all who may keep the ledger have answered, and nobody does."""
_RETRY_SECONDS = (0.2, 2.0)
"""The first pause before it looks again, and the longest."""
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
        with self.fleet.allocator() as allocator:
            slots = allocator.slots
            hosts = {node: slots.host_of(node) for node in self.fleet.agents.obeying if slots.is_up(node)}
        by_host = {host: node for node, host in reversed(hosts.items())}
        first = [node for host, node in by_host.items() if host != here]
        others = [node for node in hosts if node not in first]
        return [*first, *others][:_MOST_KEEPERS]

    def _needs_interim(self, keepers: Sequence[NodeId]) -> bool:
        """Return whether no agent keeps the ledger, or none that would outlive the host of this process."""
        with self.fleet.allocator() as allocator:
            hosts = [allocator.slots.host_of(node) for node in keepers]
        return not any(not self._has_other_hosts or host != self.fleet.here for host in hosts)

    def reported(self, node: NodeId, generation: int) -> None:
        """Learn that an agent has the ledger of this generation. 0: none of this driver."""
        if self._interim is not None and generation > self._interim and not self._needs_interim([node]):
            self._interim = None
            self.fleet.to_do.put(partial(interim_keeper.end, self._spec.token))


class FencedLeadership:
    """Writes the ledger after each batch of what the driver has heard, and ends this process if it was replaced."""

    def __init__(self, facts: RunFacts, keepers: LedgerKeepers, folder: RunFolder, place: Succession) -> None:
        self.predecessor = predecessor = place.predecessor
        self.wake_at = float("inf")
        self._facts = facts
        self._keepers = keepers
        self._folder = folder
        self._place = place
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
        return self._doubt_at >= self._keepers.fleet.head.answered_at

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
            self._place.on_command(self._folder.where)

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
        if self._saved == self._folder.recorded.count and not has_orders:
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
        self._saved, self._saved_at = self._folder.recorded.count, now
        self._keepers.flush(self.dumped(ledger, at))

    def dumped(self, decisions: DriverLedger, at: RunTime) -> bytes:
        """Return the ledger at this time of the run, for `ledger.load`."""
        with self._keepers.fleet.allocator() as allocator:
            return ledgers.dump(
                Ledger(
                    facts=self._facts,
                    decisions=decisions,
                    allocator=allocator,
                    folder=self._folder.recorded.state(),
                    now=at,
                    wall=time.time(),
                    clock=time.monotonic(),
                    host=self._keepers.fleet.here,
                )
            )

    def ended(self, nodes: NodeRegistry) -> None:
        """End this process if another driver may go on with the run."""
        asked_at = time.monotonic()
        known = self._place.is_in_command()
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


def _nothing(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """The place of a driver among the drivers of its run."""

    token: str
    request: bytes
    """See `RunFacts`."""
    epoch: int = 1
    on_command: Callable[[str], None] = _nothing
    """Is called with the path of the run folder when this driver has taken over, in its thread."""
    predecessor: LastDriver | None = None
    """None: this is the first driver."""

    def facts(self, asked: Job, job: Job, plan: Plan, run_id: str, began: str, spec: AgentSpec) -> RunFacts:
        """Return what the drivers of the run need. The arguments are its fields."""
        spec = replace(spec, token=self.token, epoch=0)
        return RunFacts(request=self.request, asked=asked, job=job, plan=plan, run_id=run_id, began=began, spec=spec)

    def is_in_command(self) -> bool | None:
        """Return whether no other driver has taken over, or is about to, and the run was not ended.

        None: the head does not answer.
        """
        try:
            if not gcs_monitor.is_same_head(_HEAD_SECONDS):
                return True  # a head that was started anew knows no other driver
            latest = named_resources.announced(self.token)
            return latest is not None and latest <= self.epoch and gcs_monitor.is_this_machine_alive()
        except Exception:  # noqa: BLE001
            return None

    def fleet(self, plan: Plan, spec: AgentSpec, say: Callable[[str], None], leave: Callable[[str], None]) -> RayFleet:
        """Return the agents: those that there are, or none yet. `leave` ends this process, if it was replaced."""
        allocator = None
        if self.predecessor is not None:
            ledger = self.predecessor.ledger
            allocator = ledger.allocator
            allocator.shift(ledger.clock_shift())
        return RayFleet(plan, spec, say, epoch=self.epoch, leave=leave, allocator=allocator)

    def driver(
        self,
        facts: RunFacts,
        fleet: RayFleet,
        folder: RunFolder,
        observer: RunObserver,
        began: float,
        links: LinkServer | None,
        capabilities: Iterable[Capability] = (),
    ) -> Driver:
        """Return the driver. `began`: the time.monotonic() of the run's beginning."""
        keepers = LedgerKeepers(fleet, facts.spec, self.epoch)
        leadership = FencedLeadership(facts, keepers, folder, self)
        driver = Driver(facts.job, facts.run_id, fleet, folder, observer, began, links, leadership, capabilities)
        folder.fence.on_leave = partial(end_nodes, driver.nodes)
        return driver

    def describe(self) -> str:
        """Return what to say of the takeover."""
        last = self.predecessor
        gone = last.process_seconds + last.state_seconds if last is not None else 0.0
        return f"driver {self.epoch} has taken over, {duration(gone)} after the last one was gone"


class UnansweredError(Exception):
    """Somebody who may keep the ledger of the run does not answer; who, for a person."""


def await_ledger(
    look: Callable[[], Succession | None],
    patience: float,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Succession | None:
    """Return what `look` finds, which is called until it finds something. None: there is nothing to go on with.

    That is so if `look` returns None for half a minute, or after `patience` seconds: who did not answer until then does
    not keep the ledger any more. As long as `look` raises UnansweredError, or RayError or RuntimeError, as Ray does
    when the head does not answer, nobody can tell. `say` takes that each time, for a person.
    """
    began = answered = clock()
    pause, longest = _RETRY_SECONDS
    while True:
        found = None
        try:
            found = look()
        except (UnansweredError, RayError, RuntimeError) as error:
            who = str(error) if isinstance(error, UnansweredError) else "the head of the cluster"
            say(f"{who} does not answer")
            answered = clock()
        if found is not None or clock() >= min(began + patience, answered + _NOBODY_SECONDS):
            return found
        sleep(pause)
        pause = min(longest, 2 * pause)


def find(token: str, since: float) -> Succession | None:
    """Ask agents and the interim keeper of a run for the newest ledger. None: nobody keeps any.

    `since`: the time.monotonic() at which this process began to look for it. Raises UnansweredError if an agent that
    may have the ledger does not answer, and RayError or RuntimeError if the head does not.
    """
    try:
        interim = interim_keeper.look(token, _LOOK_SECONDS)
    except (GetTimeoutError, RayActorError):
        raise UnansweredError("the interim keeper of the ledger") from None
    if interim is not None and not interim.ledger:  # its driver died before it had any agent
        named_resources.announce(token, interim.epoch)
        return Succession(token=token, request=interim.request, epoch=interim.epoch)
    newest = _Newest(interim)
    newest.ask(token)
    if newest.ledger is None:
        return None
    named_resources.announce(token, newest.epoch)
    now = time.monotonic()
    last = LastDriver(
        ledger=newest.ledger,
        driver=newest.epoch,
        process_seconds=max(0.0, newest.alone - (now - since)),
        state_seconds=now - since,
        found_at=now,
        is_gone=newest.saw_end,
    )
    return Succession(token=token, request=newest.ledger.facts.request, epoch=newest.epoch, predecessor=last)


class _Newest:
    """The newest ledger that is found."""

    def __init__(self, interim: InterimState | None) -> None:
        self._kept = interim.kept if interim is not None else (0, 0)
        #: The newest that was not decoded yet.
        self._message = interim.ledger if interim is not None else b""
        self.ledger: Ledger | None = None
        #: The highest generation of a goal that an agent was shown: a ledger has gone out with it.
        self._generation = 0
        #: Higher than any that anybody has seen.
        self.epoch = interim.epoch if interim is not None else 1
        self.alone = 0.0
        self.saw_end = False

    def ask(self, token: str) -> None:
        """Ask the agents. Those that were not up yet by the newest ledger need not answer: some may wait for a host.

        Raises UnansweredError if one that may have the only ledger does not answer.
        """
        names = {
            actor: NodeId(node)
            for name, node in named_resources.agents(token).items()
            if (actor := named_resources.actor(name))
        }
        asked = {actor.look.remote(): node for actor, node in names.items()}
        deadline = time.monotonic() + _LOOK_SECONDS
        silent: list[NodeId] = []
        awaits = True
        while asked and awaits and time.monotonic() < deadline:
            ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=_WAIT_SECONDS)
            answers, unreached = _answers(ready)
            for found in answers:
                self._take(found)
            silent += [asked[reference] for reference in unreached]
            for reference in ready:
                del asked[reference]
            awaits = self._awaits(asked.values())
        self._open()
        silent += asked.values()
        if silent and self.ledger is None:
            listed = host_list(sorted(silent, key=natural_key))
            raise UnansweredError(f"an agent that may keep the ledger ({listed})")

    def _awaits(self, nodes: Iterable[NodeId]) -> bool:
        """Return whether one of these may keep a newer ledger. Who was a keeper once still has an old one."""
        self._open()
        if self.ledger is None or self._kept[1] < self._generation:
            return True
        return not {*self.ledger.allocator.slots.up_nodes()}.isdisjoint(nodes)

    def _take(self, found: Adoption) -> None:
        self._generation = max(self._generation, found.goal.generation)
        self.epoch, self.alone = max(self.epoch, found.epoch + 1), max(self.alone, found.alone)
        self.saw_end |= found.saw_end
        if found.ledger and found.kept > self._kept:
            self._kept, self._message = found.kept, found.ledger

    def _open(self) -> None:
        """Decode only the newest: several agents keep one, and each may be large."""
        if self._message:
            self.ledger, self._message = ledgers.load(self._message), b""


def _answers(ready: list[Any]) -> tuple[list[Adoption], list[Any]]:
    """Return what agents have answered, and the references to answers of those that cannot be reached now.

    One that died has not answered. All at once, which is faster where there are many.
    """
    try:
        return [*ray.get(ready)], []
    except RayActorError:
        found, unreached = [], []
        for reference in ready:
            try:
                found.append(ray.get(reference))
            except ActorUnavailableError:
                unreached.append(reference)
            except ActorDiedError:
                pass
        return found, unreached
