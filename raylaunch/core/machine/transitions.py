"""The transitions between phases: the launch of a world, and its end, after which another attempt may come.

A world ends in STOPPING, or in STARTING at once. `saving` is the phase before a planned end.
"""

from __future__ import annotations

from collections.abc import Collection

from raylaunch.core.machine.events_and_actions import Action, Finish, Launch, Release, Stop
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.save_time import STOP_MARGIN
from raylaunch.core.machine.state import Gathering, Starting, Stopping, World
from raylaunch.core.newtypes import SIGTERM, NodeId, SignalName
from raylaunch.core.text import count
from raylaunch.errors import JOB_FAILURES

# The launch of a world, and the wait for enough nodes: GATHERING -> STARTING.


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
    chosen, drained, last = run.chosen_next(), release_drained(run), run.world
    staying = run.world.staying_in(chosen) if at_once else ()
    run.world = World(
        attempt=max(run.world.attempt, run.world.told_attempt) + 1,
        roster=tuple(member.node for member in chosen),
        members=chosen,
        size=sum(member.nproc for member in chosen),
        launched_at=run.now,
        held_signals=run.world.held_signals,
        elastic=set(staying),
        staying=staying,
    )
    status = f"starting {run.workers_and_nodes}"
    run.enter(Starting(status=status, deadline=run.now + run.job.start_timeout, awaited=set(run.world.roster)))
    launch = Launch(attempt=run.world.attempt, roster=run.world.roster, why=why, staying=staying)
    releases = [*drained, *release_surplus(run, last)]
    return [launch, *releases, *run.set_timer("all workers must be started by then")]


def release_drained(run: Run, kept: Collection[NodeId] = ()) -> list[Action]:
    """Release the drained nodes except `kept`. Whoever drains them waits."""
    drained = [node for node, member in run.nodes.items() if member.draining and node not in kept]
    for node in drained:
        run.members.remove(node)
    return [Release(node=node, why="it is being drained", frees_memory=not run.world.needs(node)) for node in drained]


def release_surplus(run: Run, last: World | None = None) -> list[Action]:
    """Release nodes without workers beyond MAX and the spare ones: a person has requested fewer nodes.

    `last`: the world that has just ended.
    """
    if not run.is_resized:
        return []
    idle = [node for node, member in run.nodes.items() if not member.draining and node not in run.world.nodes]
    taking_part = len(run.members) - len(idle)
    surplus = idle[max(0, run.job.max_nodes + run.job.spares - taking_part) :]
    for node in surplus:
        run.members.remove(node)
    why = "fewer nodes were requested"
    return [Release(node=node, why=why, frees_memory=last is None or not last.needs(node)) for node in surplus]


# The end of a world: any phase with a world -> STOPPING, or STARTING at once.


def restart_world(run: Run, why: str, *, backoff_until: float | None = None, all_anew: bool = False) -> list[Action]:
    """End a broken world without grace, and launch the next at once if there are nodes for it.

    `all_anew`: no worker stays.
    """
    if backoff_until is not None or not run.members.enough:
        return stop_world(run, why, grace=0.0, backoff_until=backoff_until)
    stop = Stop(attempt=run.world.attempt, nodes=run.present_nodes(), grace=0.0, why=why)
    return [stop, *launch_world(run, why, at_once=not all_anew)]


def replace_world(run: Run, why: str, *, ending: Finish | None = None) -> list[Action]:
    """End a healthy world that has nothing to save. If some of its workers can stay, the next begins at once."""
    if ending is None and run.some_can_stay:
        return restart_world(run, why)
    return stop_with_grace(run, why, ending=ending)


def stop_with_grace(run: Run, why: str, *, ending: Finish | None = None) -> list[Action]:
    """End a healthy world. The grace ends before the run must be over, or a drained node is taken away."""
    return stop_world(run, why, grace=min(run.job.shutdown_timeout, run.seconds_left), ending=ending)


def stop_world(
    run: Run,
    why: str,
    *,
    grace: float,
    ending: Finish | None = None,
    signal: SignalName = SIGTERM,
    backoff_until: float | None = None,
) -> list[Action]:
    """End the world and wait until it is gone; then comes the ending, or another attempt.

    A process that was killed takes long to end if it has much memory of a GPU, or pinned for one. Only where the run is
    to end in time, nodes are not waited for.
    """
    nodes = run.present_nodes()
    is_urgent = ending is not None and ending.exit_code not in JOB_FAILURES
    kill_at = run.now + grace
    stopping = Stopping(
        status=why,
        deadline=kill_at + (STOP_MARGIN if is_urgent else run.job.start_timeout),
        kill_at=kill_at,
        awaited=set(nodes),
        ending=ending,
        backoff_until=backoff_until,
        signal=signal,
    )
    run.enter(stopping)
    stop = Stop(attempt=run.world.attempt, nodes=nodes, grace=grace, why=why, signal=signal)
    if not nodes:
        return [stop, *go_on_if_all_stopped(run, stopping)]
    return [stop, *run.set_timer("all workers must be gone by then")]


def end_after_stop(run: Run, state: Stopping, ending: Finish) -> list[Action]:
    """Let the run end when a world that is being stopped is gone, and in time."""
    state.ending = state.ending or ending
    state.deadline = min(state.deadline, max(run.now, state.kill_at) + STOP_MARGIN)
    return run.set_timer("the run ends when all workers are gone")


def go_on_if_all_stopped(run: Run, state: Stopping) -> list[Action]:
    """End STOPPING when no node is awaited any more: the run ends, or another attempt follows."""
    if state.awaited:
        return []
    if state.ending is not None:
        return run.finish(state.ending.exit_code, state.ending.why)
    if state.backoff_until is None and run.members.enough:
        return launch_world(run, state.status)
    gathering = Gathering(
        status=state.status,
        deadline=run.now + run.job.join_timeout,
        why=state.status,
        last_call=state.backoff_until,
        backoff_until=state.backoff_until,
    )
    run.enter(gathering)
    return [*release_drained(run), *gather(run, gathering, gathering.why)]
