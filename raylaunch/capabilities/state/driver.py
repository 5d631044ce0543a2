"""Says to which agent each one copies, which killed agents may have left parts of commits, and when it is the end."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import msgpack

from raylaunch.capabilities.state import last_checkpoint
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.cluster.capability import NEVER, DriverPart, DriverPort
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.machine.events_and_actions import RestartRequested
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import HostId, NodeId, RunTime
from raylaunch.core.placement.environment import Member
from raylaunch.errors import InterruptedByUserError

_MOST_TRIES = 3
"""Attempts that ask the subreaper of a lost node: one that has fetched parts may fail before it makes a commit."""


class HeldState(DriverPart):
    """What nodes hold: each agent copies commits and files to one on the next host of the world, in rank order."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._machine = port.machine
        self._told: dict[NodeId, StateStatus] = {}
        #: The nodes that have been in a world, and may hold parts of commits.
        self._holders: set[NodeId] = set()
        #: How many attempts ask the subreaper of a killed agent yet.
        self._tries: dict[CopyAddress, int] = {}
        self._goals: dict[NodeId, StateGoal] = {}
        #: A node whose survivors have nothing to restore, and the attempt in which they wait for the next one.
        self._stuck: tuple[NodeId, int] | None = None

    def launched(self, now: RunTime) -> None:
        """Tell each node to whom it copies, and whom it asks for what it lacks."""
        world, attempt = self._machine.world, self._machine.attempt
        copies_to = self._addresses(targets(world.members, self._machine.leaving))
        peers, lost, self._goals = self._peers(), self._lost(), {}
        for node in world.roster:
            goal = StateGoal(
                attempt=attempt,
                copies_to=copies_to.get(node),
                peers=peers,
                lost=lost if node == world.roster[0] else (),
                has_survivors=bool(world.staying),
            )
            if goal != StateGoal(attempt=attempt):
                self._show(node, goal)
        if self._machine.phase is Phase.SAVING:  # this driver takes over
            self.saving(now)

    def saving(self, now: RunTime) -> None:
        """If nodes leave after this checkpoint, tell all to copy their last commit to one that does not."""
        del now
        world, leaving = self._machine.world, self._machine.leaving
        if not leaving:
            return
        found = self._addresses(over(world.roster, world.replacements) or targets(world.members, leaving))
        for node, target in found.items():
            goal = self._goals.get(node, StateGoal(attempt=world.attempt))
            self._show(node, replace(goal, copies_to=target, awaits_copy=True))

    def _show(self, node: NodeId, goal: StateGoal) -> None:
        if goal != self._goals.get(node):
            self._goals[node] = goal
            self._port.show(node, msgpack.encode(goal))

    def _addresses(self, nodes: Mapping[NodeId, NodeId]) -> dict[NodeId, CopyAddress]:
        """Return where the agents of these nodes give and take copies, as far as they have said so."""
        told = {name: self._told.get(node, StateStatus()).at for name, node in nodes.items()}
        return {name: at for name, at in told.items() if at is not None}

    def _peers(self) -> tuple[CopyAddress, ...]:
        """Return where nodes find files that they may need at the beginning of an attempt; none if there are none."""
        nodes = {node: node for node in self._machine.nodes}
        has_files = any(self._told.get(node, StateStatus()).has_files for node in nodes)
        return tuple(self._addresses(nodes).values()) if has_files else ()

    def _lost(self) -> tuple[CopyAddress, ...]:
        """Return where the node of rank 0 asks what others hold than the nodes of the world, when an attempt begins."""
        world = self._machine.world.roster
        idle = self._addresses({node: node for node in sorted(self._holders.difference(world))})
        found = (*(replace(at, outside=True) for at in idle.values()), *self._tries)
        self._tries = {one: tries - 1 for one, tries in self._tries.items() if tries > 1}
        self._holders.update(world)
        return found

    def lost(self, node: NodeId, *, is_dead: bool) -> None:
        """Let the next attempts ask the subreaper of an agent that is killed what it holds."""
        self._holders.discard(node)
        at = self._told.pop(node, StateStatus()).at
        if at is not None and is_dead:
            self._tries[replace(at, outside=True)] = _MOST_TRIES

    def told(self, node: NodeId, section: bytes) -> None:
        """Take what a node holds."""
        before, status = self._told.get(node, StateStatus()), msgpack.decode(section, type=StateStatus)
        self._told[node] = status
        if self._machine.attempt == status.stuck_attempt != before.stuck_attempt:
            self._stuck = node, status.stuck_attempt

    @property
    def next_check(self) -> float:
        """At once, if survivors have nothing to restore."""
        return NEVER if self._stuck is None else 0.0

    def due_events(self, now: RunTime) -> Iterable[RestartRequested]:
        """Return a request for an attempt without survivors."""
        stuck, self._stuck = self._stuck, None
        if stuck is not None and stuck[1] == self._machine.attempt:
            by = f"{stuck[0]}, whose survivors have nothing to restore,"
            yield RestartRequested(at=now, by=by, save_seconds=0.0)

    def ended(self) -> None:
        """Have the last commit written to disk, if the job wants that."""
        try:
            last_checkpoint.write(self._port.ask, self._machine.nodes, self._port.say)
        except InterruptedByUserError as error:
            self._port.say(f"the last checkpoint is given up: {error.message}")
            raise


def over(nodes: Sequence[NodeId], others: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """Return to which of the others each node copies, in turn; empty: there are no others."""
    return {node: others[place % len(others)] for place, node in enumerate(nodes) if others}


def targets(members: Sequence[Member], avoided: Container[NodeId] = ()) -> dict[NodeId, NodeId]:
    """Return to which node each one copies: one of the next host that has nodes which are not `avoided`.

    The nodes of a host divide their copies among the nodes of the next one. If there is only one host, nodes copy only
    if some are `avoided`, since these are about to go: each node copies to another one that stays, if there is one.
    """
    hosts: dict[HostId, list[NodeId]] = {}
    for member in members:
        hosts.setdefault(member.host, []).append(member.node)
    groups = [*hosts.values()]
    if len(groups) == 1:
        return _targets_on_host(groups[0], avoided)
    found: dict[NodeId, NodeId] = {}
    for place, group in enumerate(groups):
        others = [*groups[place + 1 :], *groups[:place]]
        staying = ([node for node in other if node not in avoided] for other in others)
        after = next(filter(None, staying), others[0])
        found |= {node: after[index % len(after)] for index, node in enumerate(group)}
    return found


def _targets_on_host(nodes: Sequence[NodeId], avoided: Container[NodeId]) -> dict[NodeId, NodeId]:
    staying = [node for node in nodes if node not in avoided]
    if len(staying) == len(nodes):
        return {}
    found: dict[NodeId, NodeId] = {}
    for place, node in enumerate(nodes):
        later = [other for other in (*nodes[place + 1 :], *nodes[:place]) if other in staying]
        found |= dict.fromkeys([node] if later else [], *later[:1])
    return found
