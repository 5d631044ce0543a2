"""What follows when nodes are lost, given up, or cannot reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raylaunch.core.machine.events_and_actions import (
    Action,
    Cordon,
    Finish,
    PeersUnreachable,
    Progressed,
    Release,
    UnreachablePeer,
)
from raylaunch.core.machine.restart_policy import NEEDED_EXCLUSION
from raylaunch.core.machine.state import AwaitingNodes, Gathering, Saving, Stopping
from raylaunch.core.machine.transitions import PhaseTransitions
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count
from raylaunch.errors import ExitCode

_MOST_NAMED = 3
"""The most pairs of hosts that a message names."""


def hosts_to_leave_out(pairs: Iterable[tuple[HostId, HostId]], hosts: Sequence[HostId]) -> list[HostId]:
    """Return the hosts to leave out, so that no pair has both of its hosts left.

    The host that is in most pairs is taken first, and of equal ones the last in `hosts`. `hosts` has all hosts of the
    pairs: first the host of node rank 0, then the others in the order in which they joined.
    """
    left = {frozenset(pair) for pair in pairs}
    found = []
    while left:
        degrees = Counter(host for pair in left for host in pair)
        found.append(max(degrees, key=lambda host: (degrees[host], hosts.index(host))))
        left = {pair for pair in left if found[-1] not in pair}
    return found


class NodeLosses(PhaseTransitions):
    """The part of `Machine` that goes on without nodes: those that are gone, fail too often or cannot be reached."""

    def _node_lost(self, node: NodeId, why: str) -> list[Action]:
        unfinished = len(self.world.unfinished)
        member = self._remove_node(node)
        pardoned = self.budget.pardon(member, self.now)
        cordon, clause = self._blame_host_of(member)
        took_part = len(self.world.unfinished) < unfinished
        what = f"{node} was lost: {why}{clause}"
        return [*cordon, *self._go_on_without_lost(what, took_part=took_part, pardoned=pardoned)]

    def _go_on_without_lost(self, what: str, *, took_part: bool, pardoned: bool) -> list[Action]:
        """Go on after nodes were lost. `pardoned`: the loss explains earlier failures of workers."""
        match self.state:
            case Gathering() as gathering:
                return self._gather(gathering, what)
            case Stopping() as stopping:
                if pardoned and stopping.ending is not None and stopping.ending.exit_code == ExitCode.JOB_FAILED:
                    stopping.status, stopping.ending = what, None
                return self._go_on_if_all_stopped(stopping)
            case _ if not took_part:
                return self._set_timer("more nodes may come")
            case Saving() as saving:
                return self._end_saving(saving, what)
            case _:
                return self._restart(what)

    # Nodes that are given up

    def _remove_node(self, node: NodeId) -> Member:
        """Remove a node from the members, and stop waiting for it."""
        if isinstance(self.state, AwaitingNodes):
            self.state.awaited.discard(node)
        self.world.unfinished.discard(node)
        return self.members.remove(node)

    def _cordon_host_of(self, member: Member, *, needed: bool) -> tuple[list[Action], str]:
        """Exclude the host of this node, which failed too often. Return the actions and a clause that says so.

        `needed`: there are too few nodes without this host.
        """
        after = f" after {count(self.job.exclude_after, 'failure')}"
        gone, how = self._exclude_host_of(member, needed=needed, after=after)
        why = f"{member.node} is {how}"
        return [Cordon(host=member.host, why=why), *(Release(node=each.node, why=why) for each in gone)], f"; {why}"

    def _exclude_host_of(self, member: Member, *, needed: bool, after: str = "") -> tuple[list[Member], str]:
        """Exclude the host of a node, and remove the nodes there.

        Return these, and text such as `left out for 60 s after 2 failures`.
        """
        gone = [self._remove_node(node) for node in self.members.on_host(member.host)]
        self.excluded[member.host] = member.address
        seconds = self.health.exclude(member.host, self.now, needed=needed)
        but = ", unless no other comes" if needed else ""
        return gone, f"left out for {seconds:g} s{after}{but}"

    def _blame_host_of(self, gone: Member) -> tuple[list[Action], str]:
        """Count the loss of a node as a failure of its host. A host that is needed is not excluded for it."""
        if gone.draining or gone.host in self.health.excluded:
            return [], ""
        bad = self.health.blame(gone.host, self.now)
        if not bad or not self.members.enough_without(gone.host):
            return [], ""
        return self._cordon_host_of(gone, needed=False)

    def _release_unresponsive(self, state: AwaitingNodes, why: str) -> tuple[list[Action], str]:
        """Give up all awaited nodes. Return the actions and a sentence that says so."""
        actions: list[Action] = []
        unresponsive = sorted(state.awaited)
        what = f"{', '.join(unresponsive)} {why}"
        for member in [self._remove_node(node) for node in unresponsive]:
            cordon, clause = self._blame_host_of(member)
            actions += [Release(node=member.node, why=why), *cordon]
            what += clause
        return actions, what

    # Nodes that cannot reach each other

    def _progressed(self, event: Progressed) -> list[Action]:
        """Take note of steps: the script does not crash in a loop. After two of them, its nodes reach each other.

        A script may call `heartbeat()` once before its first collective.
        """
        self.crashes.progressed()
        if event.marks > 1:
            self.world.has_progressed = self.has_progressed = True
            self.world.known.tries = 0
            self.unreachable_since = None
        return []

    def _peers_unreachable(self, event: PeersUnreachable) -> list[Action]:
        """Leave out hosts until all that are left reach each other.

        That is no failure of workers, and costs no restart. If too few nodes are left, the run waits for others. The
        hosts come back after a while, in case the network was mended. If it was not, the run ends; where an attempt has
        made a step before, only when this has gone on for `join_timeout`.
        """
        peers = [peer for peer in event.peers if self._are_on_two_hosts(peer)]
        works_without = self.world.has_progressed and event.attempt < self.world.attempt
        if not peers or works_without or self._is_ended_by_a_person():
            return []
        unfinished = len(self.world.unfinished)
        what = self._describe(peers)
        gone, clauses = self._exclude_apart([(self.nodes[one.node].host, self.nodes[one.peer].host) for one in peers])
        why = f"{what}; {'; '.join(clauses)}"
        pardons = [self.budget.pardon(member, self.now) for member in gone]
        cordons = [Cordon(host=host, why=why) for host in dict.fromkeys(member.host for member in gone)]
        actions: list[Action] = [*cordons, *(Release(node=member.node, why=why) for member in gone)]
        if self._is_hopelessly_apart():
            have, want = len(self.members), self.job.min_nodes
            ending = f"{what}; without {' and '.join(member.node for member in gone)}, there are {have} of {want} nodes"
            return [*actions, *self._end_unavailable(ending)]
        took_part = len(self.world.unfinished) < unfinished
        return [*actions, *self._go_on_without_lost(why, took_part=took_part, pardoned=any(pardons))]

    def _are_on_two_hosts(self, peer: UnreachablePeer) -> bool:
        nodes = self.nodes
        return {peer.node, peer.peer} <= nodes.keys() and nodes[peer.node].host != nodes[peer.peer].host

    def _is_ended_by_a_person(self) -> bool:
        ending = self.state.ending if isinstance(self.state, Saving | Stopping) else None
        return ending is not None and ending.exit_code != ExitCode.JOB_FAILED

    def _describe(self, peers: Sequence[UnreachablePeer]) -> str:
        """Name the pairs, each once, with one of its directions."""
        pairs = {frozenset((one.node, one.peer)): one for one in reversed(peers)}
        texts = [
            f"{self._named(one.node)} and {self._named(one.peer)} cannot reach each other: "
            f"{one.node} cannot connect to {one.peer}: {one.why}"
            for one in reversed(pairs.values())
        ]
        more = [f"nor can {count(len(texts) - _MOST_NAMED, 'more pair')}"] if len(texts) > _MOST_NAMED else []
        return "; ".join([*texts[:_MOST_NAMED], *more])

    def _named(self, node: NodeId) -> str:
        return f"{node} ({self.nodes[node].address})"

    def _exclude_apart(self, pairs: Sequence[tuple[HostId, HostId]]) -> tuple[list[Member], list[str]]:
        """Exclude hosts of these pairs. Return their nodes, and a clause about each host."""
        gone, clauses = [], []
        first = [self.nodes[node].host for node in self.world.roster if node in self.nodes][:1]
        order = dict.fromkeys((*first, *(member.host for member in self.nodes.values())))
        for host in hosts_to_leave_out(pairs, [*order]):
            any_there = self.nodes[self.members.on_host(host)[0]]
            members, how = self._exclude_host_of(any_there, needed=not self.members.enough_without(host))
            names = " and ".join(member.node for member in members)
            clauses.append(f"{names} {'is' if len(members) == 1 else 'are'} {how}")
            gone += members
        return gone, clauses

    def _is_hopelessly_apart(self) -> bool:
        """Return whether there are too few nodes, and this was found before, some time ago."""
        if self.members.enough:
            return False
        since, self.unreachable_since = self.unreachable_since, self.unreachable_since or self.now
        patience = self.job.join_timeout if self.has_progressed else min(NEEDED_EXCLUSION, self.job.join_timeout)
        return since is not None and self.now - since >= patience

    def _end_unavailable(self, why: str) -> list[Action]:
        ending = Finish(exit_code=ExitCode.UNAVAILABLE, why=why)
        match self.state:
            case Gathering():
                return self._finish(ending.exit_code, ending.why)
            case Stopping() as stopping:
                stopping.ending = ending
                return self._go_on_if_all_stopped(stopping)
            case _:
                return self._stop(why, grace=0.0, ending=ending)
