"""Chooses the commit of the scripts' `State` from which a world goes on, when all its workers are started."""

from __future__ import annotations

from raylaunch.core.machine.commits import (
    RestoreCommit,
    fetches,
    lost_steps,
    newest_complete,
    newest_of,
    reason,
    safest,
)
from raylaunch.core.machine.events_and_actions import WorkersStarted
from raylaunch.core.machine.state import World
from raylaunch.core.placement.environment import assign

_MOST_TRIES = 3
"""Attempts that fetch parts from the subreapers of lost nodes, and make no step: one may be gone meanwhile."""


def take_held(world: World, event: WorkersStarted) -> None:
    """Record what a node of the world holds."""
    world.held[event.node] = event.held
    world.awaits_commit |= event.awaits_commit
    world.known.uses_state |= bool(event.held) or event.awaits_commit
    if not (event.held or event.awaits_commit):
        world.untold.add(event.node)


def restore_commit(world: World) -> list[RestoreCommit]:
    """Choose the commit from which the world goes on. Where no node holds or expects any, there is nothing to do."""
    own, world.held = world.held, {}
    orphaned = world.known.orphaned if world.known.tries < _MOST_TRIES else {}
    held = own | orphaned
    everything = [one for parts in held.values() for one in parts]
    if not everything and not world.awaits_commit:
        return []
    nodes = world.running_nodes
    chosen = newest_complete(everything)
    world.known.orphaned = {
        node: parts for node, parts in orphaned.items() if chosen is not None and any(map(chosen.has, parts))
    }
    if chosen is None or world.untold:
        why = "no node has the state of an earlier attempt" if not everything else reason(everything, chosen)
        if chosen is not None:
            names = ", ".join(sorted(world.untold))
            why = f"the state cannot be restored from memory: workers of {names} have begun without it"
        return [RestoreCommit(attempt=world.attempt, nodes=nodes, commit=None, why=why)]
    hosts = {member.node: member.host for member in world.members}
    needed = {
        part.node: chosen.parts_for(part.ranks, world.size)
        for part in assign(world.attempt, world.members)
        if part.node in own
    }
    newest = newest_of(everything).commit
    lost = lost_steps(everything, chosen) if newest != world.known.counted_loss else 0
    world.known.counted_loss = newest if lost else world.known.counted_loss
    fetched = fetches(held, needed, chosen, last=orphaned)
    world.known.tries += any(one.source in orphaned for one in fetched)
    several = len({hosts[node] for node in nodes}) > 1
    return [
        RestoreCommit(
            attempt=world.attempt,
            nodes=nodes,
            commit=chosen.commit,
            world_size=chosen.world_size,
            kept=(safest(own, hosts) or chosen.commit) if several else None,
            fetches=fetched,
            lost_steps=lost,
            why=reason(everything, chosen, lost),
        )
    ]
