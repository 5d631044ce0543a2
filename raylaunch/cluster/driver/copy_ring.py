"""Chooses the peer that each agent copies its commits to, and asks subreapers of killed agents what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from raylaunch.cluster.fleet_api import AgentLost, Fleet
from raylaunch.core.machine.commits import HeldCommit, RestoreCommit
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.node.protocol.copy_messages import CopiesServed, CopyAddress, CopyTo, ServeCopies
from raylaunch.node.protocol.messages import AnnounceCommit
from raylaunch.node.state import transfer
from raylaunch.node.state.transfer import CopyRefusedError

_ASK_SECONDS = 3.0
"""How long a subreaper may take to answer: it first imports what it needs. Where a host's processes are all gone, its
kernel refuses at once."""


@dataclass(slots=True, kw_only=True)
class KnownCopies:
    """What agents hold for the script, as they have said."""

    served: dict[NodeId, CopyAddress] = field(default_factory=dict)
    """Where they serve it. Those that are missing know of no `State` and of no files yet."""
    has_state: bool = False
    """Whether the script is known to use `State`."""
    has_files: bool = False
    """Whether it is known to have files in RAYLAUNCH_FAST_DIR."""


class CopyRing:
    """Tells each agent to which one it copies commits and files: one on the next host of the world, in rank order."""

    def __init__(self, machine: Machine, fleet: Fleet, known: KnownCopies) -> None:
        self._machine = machine
        self._fleet = fleet
        self.known = known
        #: Agents whose subreapers were asked.
        self._asked: set[NodeId] = set()
        #: What each node was told last.
        self._told: dict[NodeId, CopyTo] = {}

    def peers(self) -> tuple[CopyAddress, ...]:
        """Return where nodes find files that they may need at the beginning of an attempt; none if there are none."""
        served = self.known.served if self.known.has_files else {}
        return tuple(served[node] for node in self._machine.nodes if node in served)

    def served(self, node: NodeId, where: CopiesServed) -> None:
        """Record where an agent serves what it holds, and renew the ring."""
        address = CopyAddress(node=node, host=where.host, port=where.port, secret=where.secret)
        known = self.known
        is_new = (where.uses_state and not known.has_state) or (where.uses_files and not known.has_files)
        if known.served.get(node) == address and not is_new:
            return  # an earlier driver was told
        known.served[node] = address
        known.has_state |= where.uses_state
        if where.uses_files and not known.has_files:
            known.has_files = True
            for other in self._machine.nodes:
                if other not in known.served:
                    self._fleet.send(other, ServeCopies())
        self.renew()

    def told(self, node: NodeId, order: CopyTo) -> None:
        """Record what an earlier driver has told a node."""
        self._told[node] = order

    def asks_subreaper(self, gone: AgentLost, tell: Callable[[AgentLost], None]) -> bool:
        """Return whether the subreaper of an agent is being asked what it holds: once, in a thread.

        `tell` gets the loss again with the answer, in the thread. An agent that held nothing is not asked for, nor one
        that was silent, which may be alive.
        """
        where = self.known.served.get(gone.node)
        if where is None or gone.silent or gone.held is not None:
            return False
        if gone.node not in self._asked:
            self._asked.add(gone.node)
            thread = threading.Thread(target=_ask, args=(gone, where, tell), daemon=True, name="raylaunch-orphans")
            thread.start()
        return True

    def launched(self) -> None:
        """Tell all nodes of an attempt that is launched where they copy to."""
        self._told.clear()
        self.renew()

    def announcement(self, node: NodeId, action: RestoreCommit) -> AnnounceCommit:
        """Return what a node is told of the commit to restore."""
        return AnnounceCommit(
            attempt=action.attempt,
            commit=action.commit,
            world_size=action.world_size,
            kept=action.kept,
            fetches=tuple(
                (fetch.part, replace(where, orphaned=fetch.source not in self._machine.nodes))
                for fetch in action.fetches
                if fetch.node == node and (where := self.known.served.get(fetch.source)) is not None
            ),
        )

    def renew(self) -> None:
        """Tell the nodes whose copies are to go to another node than before: nodes may have come, or be drained.

        If other nodes replace the whole world, they are asked to take the copies. Until they answer, nothing is copied,
        since a copy on a node that leaves is of no use.
        """
        world, later = self._machine.world, self._machine.world.replacements if self.known.has_state else ()
        for node, target in (over(world.roster, later) or targets(world.members, self._machine.leaving)).items():
            if target not in self.known.served and not later:
                continue
            order = CopyTo(attempt=self._machine.attempt, target=self.known.served.get(target))
            if self._told.get(node) != order:
                self._told[node] = order
                if order.target is None:
                    self._fleet.send(target, ServeCopies())
                self._fleet.send(node, order)


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
        staying = [after for other in others if (after := [node for node in other if node not in avoided])]
        for after in (staying or others)[:1]:
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


def _ask(gone: AgentLost, where: CopyAddress, tell: Callable[[AgentLost], None]) -> None:
    try:
        with transfer.connection(where, seconds=_ASK_SECONDS) as line:
            held = transfer.ask(line, tuple[HeldCommit, ...], "held")
    except (OSError, CopyRefusedError):
        held = ()
    tell(replace(gone, held=held))
