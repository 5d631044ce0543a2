"""Which driver of a detached run this one is, and with which ledger it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.capability import Capability
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.observer import Observer
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet.ray_fleet import RayFleet, Tenure
from raylaunch.cluster.ray_api import gcs_monitor
from raylaunch.cluster.succession import interim_keeper, named_resources
from raylaunch.cluster.succession.agent_session import Adoption
from raylaunch.cluster.succession.interim_keeper import InterimState
from raylaunch.cluster.takeover.fenced_leadership import FencedLeadership, LedgerKeepers, end_nodes
from raylaunch.cluster.takeover.ledger import LastDriver, Ledger, RunFacts, load
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import natural_key
from raylaunch.core.placement.plan import Plan
from raylaunch.core.text import duration, host_list
from raylaunch.node.protocol.node_spec import AgentSpec

_LOOK_SECONDS = 2.0
"""How long agents may take to say what they keep."""
_WAIT_SECONDS = 0.3
_HEAD_SECONDS = 2.0
_NOBODY_SECONDS = 30.0
"""How long a driver looks on when all who may keep the ledger have answered, and nobody does."""
_RETRY_SECONDS = (0.2, 2.0)
"""The first pause before it looks again, and the longest."""


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
        slots = None
        if self.predecessor is not None:
            ledger = self.predecessor.ledger
            slots = ledger.slots
            slots.shift(ledger.clock_shift())
        tenure = Tenure(token=self.token, epoch=self.epoch, leave=leave)
        return RayFleet(plan, spec, say, tenure=tenure, allocator=slots)

    def driver(
        self,
        facts: RunFacts,
        fleet: RayFleet,
        folder: RunFolder,
        observer: Observer,
        began: float,
        links: LinkServer | None,
        capabilities: Iterable[Capability] = (),
    ) -> Driver:
        """Return the driver. `began`: the time.monotonic() of the run's beginning."""
        keepers = LedgerKeepers(fleet, facts.spec, self.epoch)
        leadership = FencedLeadership(facts, keepers, folder, self.predecessor, self.is_in_command, self.on_command)
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
        self._open()
        return self.ledger is None or not {*self.ledger.slots.up_nodes()}.isdisjoint(nodes)

    def _take(self, found: Adoption) -> None:
        self.epoch, self.alone = max(self.epoch, found.epoch + 1), max(self.alone, found.alone)
        self.saw_end |= found.saw_end
        if found.ledger and found.kept > self._kept:
            self._kept, self._message = found.kept, found.ledger

    def _open(self) -> None:
        """Decode only the newest: several agents keep one, and each may be large."""
        if self._message:
            self.ledger, self._message = load(self._message), b""


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
