"""The end of a world: any phase with a world -> STOPPING, or STARTING at once; then the next attempt, or the end."""

from __future__ import annotations

from raylaunch.core.machine.events_and_actions import Action, Finish, Stop
from raylaunch.core.machine.launching import gather, launch_world, release_drained
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.state import Gathering, Stopping
from raylaunch.core.newtypes import SIGTERM, SignalName

STOP_MARGIN = 10.0
"""Seconds that a node has, beyond the grace, to report that its workers are gone."""


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
    """End a healthy world. The grace ends before a drained node is taken away."""
    return stop_world(run, why, grace=min(run.job.shutdown_timeout, run.seconds_until_drained()), ending=ending)


def stop_world(
    run: Run,
    why: str,
    *,
    grace: float,
    ending: Finish | None = None,
    signal: SignalName = SIGTERM,
    backoff_until: float | None = None,
) -> list[Action]:
    """End the world and wait until it is gone; then comes the ending, or another attempt."""
    nodes = run.present_nodes()
    stopping = Stopping(
        status=why,
        deadline=run.now + grace + STOP_MARGIN,
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
