"""The checkpoint before a planned change or the end of the run: RUNNING -> SAVING -> STOPPING.

There is one way for all of them: a deadline, a signal, a drained node, nodes that join, and what a person requests.
"""

from __future__ import annotations

from dataclasses import replace

from raylaunch.core.machine.events_and_actions import Action, Finish, ReportUnsaved, RequestCheckpoint
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.save_time import MAX_SAVING_SECONDS
from raylaunch.core.machine.state import Gathering, Running, Saving, Stopping
from raylaunch.core.machine.transitions import (
    end_after_stop,
    replace_world,
    restart_world,
    stop_with_grace,
    stop_world,
)
from raylaunch.core.text import duration
from raylaunch.errors import ExitCode


def save_world(run: Run, why: str, *, seconds: float | None = None, ending: Finish | None = None) -> list[Action]:
    """Ask all workers to save at one step, within `seconds` at most if given, and then stop them."""
    nodes = run.world.running_nodes
    seconds = seconds_to_save(run, seconds)
    run.enter(Saving(status=why, deadline=run.now + seconds, awaited=set(nodes), began=run.now, ending=ending))
    choose_replacements(run)
    if run.world.replacements or run.world.nodes - run.leaving:
        run.world.copied = run.leaving
    request = RequestCheckpoint(attempt=run.world.attempt, nodes=nodes, why=f"{why}{_too_short(run, seconds)}")
    return [request, *run.set_timer("all workers must have saved by then")]


def choose_replacements(run: Run) -> None:
    """Choose the nodes that get copies of what the world saves, if all its nodes leave."""
    if run.world.nodes <= run.leaving:
        run.world.replacements = tuple(member.node for member in run.chosen_next())


def _too_short(run: Run, seconds: float) -> str:
    """Return a clause that warns of too little time to save, as far as that was measured; else ""."""
    measured = run.timing.save.measured
    if measured is None or measured <= seconds:
        return ""
    left = duration(seconds)
    return f"; a save takes {duration(measured)}, and only {left} are left: give it more time, or steps are done again"


def seconds_to_save(run: Run, longest: float | None = None) -> float:
    """Return the length of SAVING. Where the time is limited, half of it is left for the signal and its grace."""
    if longest is None:
        longest = max(MAX_SAVING_SECONDS, run.job.shutdown_timeout)
    return min(longest, _part_to_save(run, run.seconds_left))


def _part_to_save(run: Run, left: float) -> float:
    return max(left / 2, left - run.job.shutdown_timeout)


def short_grace(run: Run) -> str:
    """Return a warning if a signal would leave too little time to save, as far as that was measured; else ""."""
    seconds, measured = _part_to_save(run, run.job.grace), run.timing.save.measured
    if not run.job.grace or measured is None or measured <= seconds:
        return ""
    advice = "raise `grace`, and how long the scheduler waits after its signal, or steps are done again"
    return f"a save takes longer than the {duration(seconds)} that `grace: {run.job.grace:g}` leaves for it: {advice}"


def limit_saving(run: Run, state: Saving, seconds: float | None = None) -> list[Action]:
    """Have a save that goes on end within `seconds` at most if given, and in time."""
    state.deadline = min(state.deadline, run.now + seconds_to_save(run, seconds))
    return run.set_timer("all workers must have saved by then")


def end_run(run: Run, why: str, ending: Finish, *, seconds: float | None = None) -> list[Action]:
    """Have all workers save at one step, within `seconds` at most if given, and end the run."""
    match run.state:
        case Gathering():
            return run.finish(ending.exit_code, ending.why)
        case Running():
            return save_world(run, why, seconds=seconds, ending=ending)
        case Saving() as saving:
            if saving.ending is None:
                saving.status, saving.ending = why, ending
            return limit_saving(run, saving, seconds)
        case Stopping() as stopping:
            return end_after_stop(run, stopping, ending)
        case _:
            return stop_with_grace(run, why, ending=ending)


def stop_if_all_saved(run: Run, state: Saving) -> list[Action]:
    """End SAVING when no node is awaited any more."""
    if state.awaited:
        return []
    if state.step is not None:
        run.timing.save.saved(run.now - state.began)
        run.world.has_saved = True
    ending = state.ending
    if ending is not None and ending.exit_code == ExitCode.RESUMABLE and state.step is not None:
        saved = f"all workers have saved after step {state.step}, and a new run goes on from there"
        ending = replace(ending, why=f"{ending.why}; {saved}")
    return replace_world(run, state.status, ending=ending)


def end_saving(run: Run, state: Saving, why: str) -> list[Action]:
    """End a world that has broken while it saved."""
    if state.ending is None and run.some_can_stay:
        return restart_world(run, why)
    return stop_world(run, why, grace=0.0, ending=state.ending)


def stop_unsaved(run: Run, state: Saving, why: str) -> list[Action]:
    """Stop waiting for checkpoints. `why`: what some workers did not do."""
    unsaved = ReportUnsaved(attempt=run.world.attempt, why=why)
    return [unsaved, *stop_with_grace(run, state.status, ending=state.ending)]
