"""What follows when nodes of a world cannot connect to each other, though the driver reaches them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raylaunch.core.machine.events_and_actions import Action, Cordon, Finish, PeersUnreachable, Release, UnreachablePeer
from raylaunch.core.machine.nodes import exclude_host_of, go_on_without_lost
from raylaunch.core.machine.restart_policy import NEEDED_EXCLUSION
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.state import Gathering, Saving, Stopping
from raylaunch.core.machine.transitions import go_on_if_all_stopped, stop_world
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count
from raylaunch.errors import JOB_FAILURES, ExitCode

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


def peers_unreachable(run: Run, event: PeersUnreachable) -> list[Action]:
    """Leave out hosts until all that are left reach each other.

    That is no failure of workers, and costs no restart. If too few nodes are left, the run waits for others. The
    hosts come back after a while, in case the network was mended. If it was not, the run ends; where an attempt has
    made a step before, only when this has gone on for `join_timeout`.
    """
    peers = [peer for peer in event.peers if _are_on_two_hosts(run, peer)]
    works_without = run.world.has_progressed and event.attempt < run.world.attempt
    if not peers or works_without or _is_ended_by_a_person(run):
        return []
    unfinished = len(run.world.unfinished)
    what = _describe(run, peers)
    gone, clauses = _exclude_apart(run, [(run.nodes[one.node].host, run.nodes[one.peer].host) for one in peers])
    why = f"{what}; {'; '.join(clauses)}"
    pardons = [run.budget.pardon(member, run.now) for member in gone]
    cordons = [Cordon(host=host, why=why) for host in dict.fromkeys(member.host for member in gone)]
    actions: list[Action] = [*cordons, *(Release(node=member.node, why=why) for member in gone)]
    if _is_hopelessly_apart(run):
        have, want = len(run.members), run.job.min_nodes
        ending = f"{what}; without {' and '.join(member.node for member in gone)}, there are {have} of {want} nodes"
        return [*actions, *_end_unavailable(run, ending)]
    took_part = len(run.world.unfinished) < unfinished
    return [*actions, *go_on_without_lost(run, why, took_part=took_part, pardoned=any(pardons))]


def _are_on_two_hosts(run: Run, peer: UnreachablePeer) -> bool:
    nodes = run.nodes
    return {peer.node, peer.peer} <= nodes.keys() and nodes[peer.node].host != nodes[peer.peer].host


def _is_ended_by_a_person(run: Run) -> bool:
    ending = run.state.ending if isinstance(run.state, Saving | Stopping) else None
    return ending is not None and ending.exit_code not in JOB_FAILURES


def _describe(run: Run, peers: Sequence[UnreachablePeer]) -> str:
    """Name the pairs, each once, with one of its directions."""
    pairs = {frozenset((one.node, one.peer)): one for one in reversed(peers)}
    texts = [
        f"{_named(run, one.node)} and {_named(run, one.peer)} cannot reach each other: "
        f"{one.node} cannot connect to {one.peer}: {one.why}"
        for one in reversed(pairs.values())
    ]
    more = [f"nor can {count(len(texts) - _MOST_NAMED, 'more pair')}"] if len(texts) > _MOST_NAMED else []
    return "; ".join([*texts[:_MOST_NAMED], *more])


def _named(run: Run, node: NodeId) -> str:
    return f"{node} ({run.nodes[node].address})"


def _exclude_apart(run: Run, pairs: Sequence[tuple[HostId, HostId]]) -> tuple[list[Member], list[str]]:
    """Exclude hosts of these pairs. Return their nodes, and a clause about each host."""
    gone, clauses = [], []
    first = [run.nodes[node].host for node in run.world.roster if node in run.nodes][:1]
    order = dict.fromkeys((*first, *(member.host for member in run.nodes.values())))
    for host in hosts_to_leave_out(pairs, [*order]):
        any_there = run.nodes[run.members.on_host(host)[0]]
        members, how = exclude_host_of(run, any_there, needed=not run.members.enough_without(host))
        names = " and ".join(member.node for member in members)
        clauses.append(f"{names} {'is' if len(members) == 1 else 'are'} {how}")
        gone += members
    return gone, clauses


def _is_hopelessly_apart(run: Run) -> bool:
    """Return whether there are too few nodes, and this was found before, some time ago."""
    if run.members.enough:
        return False
    since = run.reachability.broken_since
    run.reachability.broken_since = since or run.now
    patience = run.job.join_timeout if run.reachability.proven else min(NEEDED_EXCLUSION, run.job.join_timeout)
    return since is not None and run.now - since >= patience


def _end_unavailable(run: Run, why: str) -> list[Action]:
    ending = Finish(exit_code=ExitCode.UNAVAILABLE, why=why)
    match run.state:
        case Gathering():
            return run.finish(ending.exit_code, ending.why)
        case Stopping() as stopping:
            stopping.ending = ending
            return go_on_if_all_stopped(run, stopping)
        case _:
            return stop_world(run, why, grace=0.0, ending=ending)
