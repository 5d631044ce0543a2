"""The checkpoint before a planned change: RUNNING -> SAVING -> STOPPING."""

from __future__ import annotations

from raylaunch.core.machine.events_and_actions import Action, Finish, ReportUnsaved, RequestCheckpoint
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.state import Saving
from raylaunch.core.machine.transitions import replace_world, restart_world, stop_with_grace, stop_world

MAX_SAVING_SECONDS = 600.0
"""The longest SAVING phase: all workers have to come to one step and save, and steps and checkpoints may be large."""


def save_world(run: Run, why: str, *, seconds: float | None = None, ending: Finish | None = None) -> list[Action]:
    """Ask all workers to save at one step, within `seconds` at most if given, and then stop them."""
    nodes = run.world.running_nodes
    deadline = run.now + seconds_to_save(run, seconds)
    run.enter(Saving(status=why, deadline=deadline, awaited=set(nodes), ending=ending))
    if run.world.nodes <= run.leaving:
        run.world.replacements = tuple(member.node for member in run.chosen_next())
    request = RequestCheckpoint(attempt=run.world.attempt, nodes=nodes, why=why)
    return [request, *run.set_timer("all workers must have saved by then")]


def seconds_to_save(run: Run, longest: float | None = None) -> float:
    """Return the length of SAVING. When a node is drained, half of the time is left for the signal and its grace."""
    left = run.seconds_until_drained()
    if longest is None:
        longest = max(MAX_SAVING_SECONDS, run.job.shutdown_timeout)
    return min(longest, max(left / 2, left - run.job.shutdown_timeout))


def stop_if_all_saved(run: Run, state: Saving) -> list[Action]:
    """End SAVING when no node is awaited any more."""
    return [] if state.awaited else replace_world(run, state.status, ending=state.ending)


def end_saving(run: Run, state: Saving, why: str) -> list[Action]:
    """End a world that has broken while it saved."""
    if state.ending is None and run.some_can_stay:
        return restart_world(run, why)
    return stop_world(run, why, grace=0.0, ending=state.ending)


def stop_unsaved(run: Run, state: Saving, why: str) -> list[Action]:
    """Stop waiting for checkpoints. `why`: what some workers did not do."""
    unsaved = ReportUnsaved(attempt=run.world.attempt, why=why)
    return [unsaved, *stop_with_grace(run, state.status, ending=state.ending)]
