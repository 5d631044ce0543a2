"""The launch of a world, and the wait for enough nodes: GATHERING -> STARTING."""

from __future__ import annotations

from collections.abc import Collection

from raylaunch.core.machine.events_and_actions import Action, Launch, Release
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.state import Gathering, Starting, World
from raylaunch.core.newtypes import NodeId
from raylaunch.core.text import count


def gather(run: Run, state: Gathering, why: str) -> list[Action]:
    """Launch if there are enough nodes, else update the status, which says what is missing."""
    have, low, high = len(run.members), run.job.min_nodes, run.job.max_nodes
    enough = run.members.enough
    state.status = f"{have} of {low} nodes" if low == high else f"{count(have, 'node')} ({low} to {high} requested)"
    if have >= low and not enough:
        state.status += f", but no world size that is a multiple of {run.job.multiple_of}"
    if state.backoff_until is not None and run.now < state.backoff_until:
        return run.set_timer(state.status)
    state.backoff_until = None
    if enough and (have >= high or run.is_due(state.last_call)):
        return launch_world(run, f"{state.status}; {why if have >= high else 'last call is over'}")
    if not enough:
        state.last_call = None
        run.health.shorten_exclusions(run.now)
    elif state.last_call is None:
        state.last_call = run.now + run.job.last_call
    return run.set_timer(state.status)


def launch_world(run: Run, why: str, *, at_once: bool = False) -> list[Action]:
    """Launch the next attempt. `at_once`: workers of the last world may be alive, and may stay."""
    chosen = run.chosen_next()
    staying = run.world.staying_in(chosen) if at_once else ()
    run.world = World(
        attempt=max(run.world.attempt, run.world.told_attempt) + 1,
        roster=tuple(member.node for member in chosen),
        members=chosen,
        size=sum(member.nproc for member in chosen),
        launched_at=run.now,
        held_signals=run.world.held_signals,
        known=run.world.known,
        elastic=set(staying),
        staying=staying,
    )
    status = f"starting {run.workers_and_nodes}"
    run.enter(Starting(status=status, deadline=run.now + run.job.start_timeout, awaited=set(run.world.roster)))
    launch = Launch(attempt=run.world.attempt, roster=run.world.roster, why=why, staying=staying)
    releases = [*release_drained(run), *release_surplus(run)]
    return [launch, *releases, *run.set_timer("all workers must be started by then")]


def release_drained(run: Run, kept: Collection[NodeId] = ()) -> list[Action]:
    """Release the drained nodes except `kept`. The run needs them no more, and whoever drains them waits."""
    drained = [node for node, member in run.nodes.items() if member.draining and node not in kept]
    for node in drained:
        run.members.remove(node)
    return [Release(node=node, why="it is being drained", frees_memory=True) for node in drained]


def release_surplus(run: Run) -> list[Action]:
    """Release nodes without workers beyond MAX and the spare ones: a person has requested fewer nodes."""
    if not run.is_resized:
        return []
    idle = [node for node, member in run.nodes.items() if not member.draining and node not in run.world.nodes]
    taking_part = len(run.members) - len(idle)
    surplus = idle[max(0, run.job.max_nodes + run.job.spares - taking_part) :]
    for node in surplus:
        run.members.remove(node)
    return [Release(node=node, why="fewer nodes were requested", frees_memory=True) for node in surplus]
