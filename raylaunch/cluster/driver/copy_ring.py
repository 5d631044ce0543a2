"""Knows to which agent each one copies, and which killed agents may have left parts of commits."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member

_MOST_TRIES = 3
"""Attempts that ask the subreaper of a lost node: one that has fetched parts may fail before it makes a commit."""


class CopyRing:
    """Says to which agent each one copies commits and files: to one on the next host of the world, in rank order."""

    def __init__(self, machine: Machine, nodes: NodeRegistry) -> None:
        self._machine = machine
        self._nodes = nodes
        #: How many attempts ask the subreaper of a killed agent yet.
        self._tries: dict[CopyAddress, int] = {}

    def _addresses(self, nodes: dict[NodeId, NodeId]) -> dict[NodeId, CopyAddress]:
        """Return where the agents of these nodes give and take copies, as far as they have said so."""
        found = {}
        for name, node in nodes.items():
            up = self._nodes.status(node).up
            if up is not None and up.copies_port:
                found[name] = CopyAddress(node=node, host=up.address, port=up.copies_port)
        return found

    def peers(self) -> tuple[CopyAddress, ...]:
        """Return where nodes find files that they may need at the beginning of an attempt; none if there are none."""
        nodes = [*self._machine.nodes]
        has_files = any(self._nodes.status(node).holding.has_files for node in nodes)
        return tuple(self._addresses(dict(zip(nodes, nodes, strict=True))).values()) if has_files else ()

    def targets(self, members: Sequence[Member]) -> dict[NodeId, CopyAddress]:
        """Return where the nodes of an attempt copy to."""
        return self._addresses(targets(members, self._machine.leaving))

    def targets_before_leaving(self) -> dict[NodeId, CopyAddress]:
        """Return where the nodes of the world copy their last commit to, since some leave; empty: none does."""
        world, leaving = self._machine.world, self._machine.leaving
        if not leaving:
            return {}
        return self._addresses(over(world.roster, world.replacements) or targets(world.members, leaving))

    def note_lost(self, gone: AgentLost) -> None:
        """Let the next attempts ask the subreaper of an agent what it holds, unless the agent may be alive."""
        for address in () if gone.silent else self._addresses({gone.node: gone.node}).values():
            self._tries[replace(address, orphaned=True)] = _MOST_TRIES

    def lost(self) -> tuple[CopyAddress, ...]:
        """Return where the node of rank 0 asks what killed agents held, at the beginning of an attempt."""
        found = tuple(self._tries)
        self._tries = {one: tries - 1 for one, tries in self._tries.items() if tries > 1}
        return found


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
