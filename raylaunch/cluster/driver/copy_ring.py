"""Chooses the peer that each agent copies its commits to, and asks state keepers of killed agents what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from raylaunch.cluster.fleet_api import AgentLost, Fleet
from raylaunch.core.machine.commits import RestoreCommit
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.node.protocol.copy_messages import CopiesServed, CopyAddress, CopyTo, ServeCopies
from raylaunch.node.protocol.messages import AnnounceCommit
from raylaunch.node.state import part_transfer
from raylaunch.node.state.part_transfer import CopyRefusedError

_ASK_SECONDS = 1.0
"""How long a state keeper may take to answer. Where a host's processes are all gone, its kernel refuses at once."""


class CopyRing:
    """Tells each agent to which one it copies commits and files: one on the next host of the world, in rank order."""

    def __init__(self, machine: Machine, fleet: Fleet) -> None:
        self._machine = machine
        self._fleet = fleet
        #: Where agents serve what they hold. Those that are missing know of no `State` and of no files yet.
        self._served: dict[NodeId, CopyAddress] = {}
        self._inquiry = OrphanInquiry()
        #: Whether the script is known to use `State`.
        self.has_state = False
        #: Whether it is known to have files in RAYLAUNCH_FAST_DIR.
        self._has_files = False
        #: What each node was told last.
        self._told: dict[NodeId, CopyTo] = {}

    def peers(self) -> tuple[CopyAddress, ...]:
        """Return where nodes find files that they may need at the beginning of an attempt; none if there are none."""
        return tuple(self._served[node] for node in self._machine.nodes if node in self._served and self._has_files)

    def served(self, node: NodeId, where: CopiesServed) -> None:
        """Record where an agent serves what it holds, and renew the ring."""
        self._served[node] = CopyAddress(node=node, host=where.host, port=where.port, secret=where.secret)
        self.has_state |= where.uses_state
        if where.uses_files and not self._has_files:
            self._has_files = True
            for other in self._machine.nodes:
                if other not in self._served:
                    self._fleet.send(other, ServeCopies())
        self.renew()

    def asks_keeper(self, gone: AgentLost, tell: Callable[[AgentLost], None]) -> bool:
        """Return whether the state keeper of an agent is being asked what it holds. `tell` gets the loss again then."""
        return self._inquiry.is_open(gone, self._served.get(gone.node), tell)

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
                if fetch.node == node and (where := self._served.get(fetch.source)) is not None
            ),
        )

    def renew(self) -> None:
        """Tell the nodes whose copies are to go to another node than before: nodes may have come, or be drained.

        If other nodes replace the whole world, they are asked to take the copies. Until they answer, nothing is copied,
        since a copy on a node that leaves is of no use.
        """
        world, later = self._machine.world, self._machine.world.replacements if self.has_state else ()
        for node, target in (over(world.roster, later) or targets(world.members, self._machine.leaving)).items():
            if target not in self._served and not later:
                continue
            order = CopyTo(attempt=self._machine.attempt, target=self._served.get(target))
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


class OrphanInquiry:
    """Asks for each agent once, in a thread."""

    def __init__(self) -> None:
        self._asked: set[NodeId] = set()

    def __reduce__(self) -> tuple[type[OrphanInquiry], tuple[()]]:
        """Leave out what was asked: the answer would come to this process. A driver that takes over asks again."""
        return OrphanInquiry, ()

    def is_open(self, gone: AgentLost, where: CopyAddress | None, tell: Callable[[AgentLost], None]) -> bool:
        """Return whether to wait for an answer before this loss is dealt with. It is asked for if it was not yet.

        `where`: where the agent served what it held; None: it held nothing. `tell` gets the loss again, with the
        answer; it is called in a thread. An agent that was silent may be alive, and is not asked for.
        """
        if where is None or gone.silent or gone.held is not None:
            return False
        if gone.node not in self._asked:
            self._asked.add(gone.node)
            thread = threading.Thread(target=self._ask, args=(gone, where, tell), daemon=True, name="raylaunch-orphans")
            thread.start()
        return True

    @staticmethod
    def _ask(gone: AgentLost, where: CopyAddress, tell: Callable[[AgentLost], None]) -> None:
        try:
            held = part_transfer.ask_list(where, seconds=_ASK_SECONDS)
        except (OSError, CopyRefusedError):
            held = ()
        tell(replace(gone, held=held))
