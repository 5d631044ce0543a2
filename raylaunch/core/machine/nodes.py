"""What follows when nodes join, are drained, are lost or are given up."""

from __future__ import annotations

from raylaunch.core.machine.events_and_actions import Action, Cordon, NodeDraining, NodeJoined, NodeLost, Release
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.save_time import Deadline
from raylaunch.core.machine.saving import choose_replacements, end_saving, limit_saving, save_world
from raylaunch.core.machine.state import AwaitingNodes, Gathering, ResizeTimes, Running, Saving, Starting, Stopping
from raylaunch.core.machine.transitions import (
    gather,
    go_on_if_all_stopped,
    release_drained,
    restart_world,
)
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Member
from raylaunch.core.text import count, host_list
from raylaunch.errors import JOB_FAILURES


def node_joined(run: Run, event: NodeJoined) -> list[Action]:
    """Take in a node whose agent is ready, unless its host may not be used."""
    if event.host in run.health.excluded:
        return [Release(node=event.node, why="its host is left out at present")]
    if event.host in run.health.drained:
        return [Release(node=event.node, why="its host is drained")]
    run.members.add(Member(node=event.node, address=event.address, nproc=event.nproc, host=event.host))
    if len(run.members) >= run.wanted_nodes > run.job.min_nodes:
        run.set_bounds(run.wanted_nodes, run.job.max_nodes)
    match run.state:
        case Gathering() as gathering:
            return gather(run, gathering, f"{event.node} joined")
        case Starting() | Running() as state:
            return plan_resize(run, state, f"{event.node} joined")
        case _:
            return []


def plan_resize(run: Run, state: Starting | Running, why: str) -> list[Action]:
    """Take in nodes that are ready: now if no other has to be waited for, else at last call."""
    resize = state.resize
    complete = len(run.members) >= run.job.max_nodes or resize.evacuate_at is not None
    if (resize.last_call is None or complete) and not could_improve(run, resize):
        return []
    if isinstance(state, Running) and complete:
        return save_world(run, why)
    if resize.last_call is None or complete:
        resize.last_call = run.now + (0.0 if complete else run.job.last_call)
    return run.set_timer(f"{why}; more may come")


def could_improve(run: Run, resize: ResizeTimes) -> bool:
    """Return whether the members allow a better world. A world that has begun to finish is not disturbed for it."""
    if run.world.finishing:
        return False
    if resize.evacuate_at is not None:
        return run.members.enough
    if len(run.world.roster) >= run.job.max_nodes or len(run.members) < run.wanted_nodes:
        return False
    return sum(member.nproc for member in run.members.choose(run.world.roster)) > run.world.size


def node_draining(run: Run, event: NodeDraining) -> list[Action]:
    """Leave a node before it is taken away."""
    cordon = _leave_host(run, event) if event.by else []
    run.members.drain(event.node)
    why = f"{event.node} is being drained: {event.why}"
    if isinstance(run.state, Gathering):
        return [*cordon, *release_drained(run), *gather(run, run.state, why)]
    released = [*cordon, *release_drained(run, kept=run.world.nodes)]
    choose_replacements(run)
    return [*released, *_world_drained(run, event, why)] if event.node in run.world.unfinished else released


def _leave_host(run: Run, event: NodeDraining) -> list[Action]:
    """Stop using the host of a node that a person drains."""
    member = run.nodes[event.node]
    if not member.host or member.host in run.health.drained:
        return []
    run.health.drained.add(member.host)
    return [Cordon(host=member.host, why=f"no node is used on the host of {event.node} ({member.address}) any more")]


def _world_drained(run: Run, event: NodeDraining, why: str) -> list[Action]:
    """Plan to leave a node of the world before its deadline."""
    deadline = run.world.deadline
    if deadline is None or event.deadline < deadline.at:
        since = run.now if deadline is None else deadline.since
        deadline = run.world.deadline = Deadline(at=event.deadline, since=since, why=why)
    match run.state:
        case Saving() as saving:
            return limit_saving(run, saving)
        case Running() if run.members.enough:
            return save_world(run, why)
        case Starting() as starting if run.members.enough:
            starting.resize.evacuate_at = run.now  # once it runs: what only this node holds must be restored first
            return run.set_timer(why)
        case Starting() | Running() as state:
            state.status = f"{why}; the workers go on until another node comes"
            state.status += "" if event.by else ", or the time is short"
            state.resize.evacuate_at = run.latest_save(deadline)
            run.health.shorten_exclusions(run.now)
            return run.set_timer(state.status)
        case _:
            return []


def node_lost(run: Run, event: NodeLost) -> list[Action]:
    """Go on without a node that is gone. Its loss explains failures of workers just before."""
    unfinished = len(run.world.unfinished)
    member = _remove_node(run, event.node)
    pardoned = run.budget.pardon(member, run.now)
    cordon, clause = _blame_host_of(run, member)
    took_part = len(run.world.unfinished) < unfinished
    what = f"{event.node} was lost: {event.why}{clause}"
    return [*cordon, *go_on_without_lost(run, what, took_part=took_part, pardoned=pardoned)]


def go_on_without_lost(run: Run, what: str, *, took_part: bool, pardoned: bool) -> list[Action]:
    """Go on after nodes were lost. `pardoned`: the loss explains earlier failures of workers."""
    match run.state:
        case Gathering() as gathering:
            return gather(run, gathering, what)
        case Stopping() as stopping:
            if pardoned and stopping.ending is not None and stopping.ending.exit_code in JOB_FAILURES:
                stopping.status, stopping.ending = what, None
            return go_on_if_all_stopped(run, stopping) or run.set_timer("an excluded host may be used again then")
        case _ if not took_part:
            choose_replacements(run)
            return run.set_timer("more nodes may come")
        case Saving() as saving:
            return end_saving(run, saving, what)
        case _:
            return restart_world(run, what)


def _remove_node(run: Run, node: NodeId) -> Member:
    """Remove a node from the members, and stop waiting for it."""
    if isinstance(run.state, AwaitingNodes):
        run.state.awaited.discard(node)
    run.world.unfinished.discard(node)
    return run.members.remove(node)


def cordon_host_of(run: Run, member: Member, *, needed: bool) -> tuple[list[Action], str]:
    """Exclude the host of this node, which failed too often. Return the actions and a clause that says so.

    `needed`: there are too few nodes without this host.
    """
    after = f" after {count(run.job.exclude_after, 'failure')}"
    gone, how = exclude_host_of(run, member, needed=needed, after=after)
    why = f"{member.node} is {how}"
    return [Cordon(host=member.host, why=why), *(Release(node=each.node, why=why) for each in gone)], f"; {why}"


def exclude_host_of(run: Run, member: Member, *, needed: bool, after: str = "") -> tuple[list[Member], str]:
    """Exclude the host of a node, and remove the nodes there.

    Return these, and text such as `left out for 60 s after 2 failures`.
    """
    gone = [_remove_node(run, node) for node in run.members.on_host(member.host)]
    seconds = run.health.exclude(member.host, run.now, address=member.address, needed=needed)
    but = ", unless no other comes" if needed else ""
    return gone, f"left out for {seconds:g} s{after}{but}"


def _blame_host_of(run: Run, gone: Member) -> tuple[list[Action], str]:
    """Count the loss of a node as a failure of its host. A host that is needed is not excluded for it."""
    if gone.draining or gone.host in run.health.excluded:
        return [], ""
    bad = run.health.blame(gone.host, run.now)
    if not bad or not run.members.enough_without(gone.host):
        return [], ""
    return cordon_host_of(run, gone, needed=False)


def release_unresponsive(run: Run, state: AwaitingNodes, why: str) -> tuple[list[Action], str]:
    """Give up all awaited nodes. Return the actions and a sentence that says so."""
    actions: list[Action] = []
    unresponsive = sorted(state.awaited)
    what = f"{host_list(unresponsive)} {why}"
    for member in [_remove_node(run, node) for node in unresponsive]:
        cordon, clause = _blame_host_of(run, member)
        actions += [Release(node=member.node, why=why), *cordon]
        what += clause
    return actions, what
