"""What follows when the time of a `SetTimer` has come, and from a deadline of the run."""

from __future__ import annotations

from raylaunch.core.machine.events_and_actions import Action, Finish, Tick, Uncordon
from raylaunch.core.machine.nodes import could_improve, release_unresponsive
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.save_time import Deadline, DeadlineSet
from raylaunch.core.machine.saving import end_run, limit_saving, save_world, stop_unsaved
from raylaunch.core.machine.state import Gathering, Running, Saving, Starting, Stopping
from raylaunch.core.machine.transitions import gather, go_on_if_all_stopped, launch_world, restart_world
from raylaunch.core.newtypes import assert_never
from raylaunch.core.text import host_list
from raylaunch.errors import ExitCode


def handle_time(run: Run, event: Tick | DeadlineSet) -> list[Action]:
    """Do what is due now, or learn of a deadline: of two, the earlier one holds."""
    return _deadline_set(run, event) if isinstance(event, DeadlineSet) else _tick(run)


def _tick(run: Run) -> list[Action]:
    run.timing.timer_at = None
    uncordoned = [
        Uncordon(host=host, why=f"{address} may be used again: its time is over")
        for host, address in run.health.end_exclusions(run.now).items()
        if host not in run.health.drained
    ]
    return [*uncordoned, *_do_what_is_due(run)]


def _deadline_set(run: Run, event: DeadlineSet) -> list[Action]:
    if run.timing.deadline is None or event.deadline < run.timing.deadline.at:
        run.timing.deadline = Deadline(at=event.deadline, since=run.now, why=event.why)
    if isinstance(run.state, Saving):
        return limit_saving(run, run.state)
    return run.set_timer("the run must be over in time")


def _do_what_is_due(run: Run) -> list[Action]:
    if run.timing.deadline is not None and run.is_due(run.end_at):
        why = run.timing.deadline.why
        ending = Finish(exit_code=ExitCode.RESUMABLE, why=f"stopped in time, since {why}")
        return end_run(run, f"the time of the run is short: {why}", ending)
    match run.state:
        case Running(resize=resize) if run.is_due(resize.evacuate_at):
            return save_world(run, "the time of a drained node is short")
        case Running(resize=resize) if run.is_due(resize.last_call):
            resize.last_call = None
            if could_improve(run, resize):
                return save_world(run, "nodes joined")
        case Gathering() as gathering if run.is_due(gathering.deadline):
            return _gathered_too_long(run, gathering)
        case Gathering() as gathering:
            return gather(run, gathering, gathering.why)
        case Starting() | Saving() | Stopping() as state if run.is_due(state.deadline):
            return _deadline_passed(run, state)
    return run.set_timer("the time has not come")


def _deadline_passed(run: Run, state: Starting | Saving | Stopping) -> list[Action]:
    match state:
        case Starting():
            releases, why = release_unresponsive(run, state, "did not start its workers in time")
            return [*releases, *restart_world(run, why)]
        case Saving():
            return stop_unsaved(run, state, f"{host_list(sorted(state.awaited))} did not save in time")
        case Stopping():
            releases, _ = release_unresponsive(run, state, "did not stop its workers in time")
            return [*releases, *go_on_if_all_stopped(run, state)]
        case _:
            return assert_never(state)


def _gathered_too_long(run: Run, state: Gathering) -> list[Action]:
    have, want = len(run.members), run.job.min_nodes
    if run.members.enough:  # the deadline came before the last call
        return launch_world(run, f"{state.status}; no more time to wait")
    waited = run.job.placement_timeout if run.world.attempt == 0 else run.job.join_timeout
    which = "" if have < want else f", and no world size that is a multiple of {run.job.multiple_of},"
    return run.finish(ExitCode.UNAVAILABLE, f"{have} of {want} nodes{which} after {waited:g} s")
