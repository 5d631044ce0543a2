"""What people may request of a run: that it stops, restarts, has other nodes, or leaves a host.

A signal to the driver is a request too. A refused command tells its user why: the driver first asks for the reason
(`refusal`), and refused requests do not reach the machine.
"""

from __future__ import annotations

import signal as signals
from dataclasses import replace

from raylaunch.core.machine.events_and_actions import (
    Action,
    Finish,
    ForwardRequested,
    NodeDraining,
    RequestEvent,
    ResizeRequested,
    RestartRequested,
    Scale,
    Stop,
    StopRequested,
)
from raylaunch.core.machine.nodes import plan_resize
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.saving import end_run, save_world
from raylaunch.core.machine.state import Done, Gathering, Running, Saving, Starting, Stopping
from raylaunch.core.machine.transitions import (
    end_after_stop,
    gather,
    release_surplus,
    replace_world,
    restart_world,
    stop_with_grace,
    stop_world,
)
from raylaunch.core.machine.workers import forward
from raylaunch.core.newtypes import assert_never
from raylaunch.core.text import count
from raylaunch.errors import ExitCode, signal_exit_code


def requested(event: StopRequested | RestartRequested | ResizeRequested) -> str:
    """Return what was requested and by whom, for a person: `ada@login-1 requested a restart`, `SIGTERM received`."""
    match event:
        case StopRequested(by=""):
            return f"{event.signal} received"
        case StopRequested():
            return f"{event.by} requested the stop"
        case RestartRequested():
            return f"{event.by} requested a restart"
        case ResizeRequested(min_nodes=low, max_nodes=high):
            return f"{event.by} requested {count(low, 'node') if low == high else f'{low} to {high} nodes'}"
        case _:
            return assert_never(event)


def refusal(run: Run, event: RequestEvent | NodeDraining) -> str:
    """Return why this request is not possible now, for a person; "" if it is."""
    if isinstance(run.state, Done):
        return f"the run has ended: {run.state.status}"
    match event:
        case StopRequested() | ForwardRequested():
            return ""
        case _ if run.is_ending:
            return f"the run is ending: {run.state.status}"
        case RestartRequested():
            return _why_no_restart(run)
        case ResizeRequested():
            return _why_no_resize(run, event)
        case NodeDraining():
            return "" if event.node in run.nodes else f"there is no {event.node} any more"
        case _:
            return assert_never(event)


def _why_no_restart(run: Run) -> str:
    if isinstance(run.state, Gathering) and run.state.backoff_until is None:
        return f"no workers run that could be restarted: {run.state.status}"
    if isinstance(run.state, Starting | Running) and not run.members.enough:
        return f"the nodes are too few for another attempt: {run.state.status}"
    return _why_undisturbed(run)


def _why_undisturbed(run: Run) -> str:
    has_world = isinstance(run.state, Starting | Running)
    return "workers have finished, and the others are about to" if has_world and run.world.finishing else ""


def _why_no_resize(run: Run, event: ResizeRequested) -> str:
    low, high = event.min_nodes, event.max_nodes
    if not 1 <= low <= high:
        return f"{low}:{high} is no range of nodes: the least is 1, and MIN is at most MAX"
    if run.job.nprocs is not None:
        return "the job asks for a number of workers (`nprocs`), not of nodes"
    if high > 1 and run.started_as.max_nodes == 1 and run.started_as.master_addr:
        return "it was started for one node, where its workers meet at `master_addr`, which may mean that node alone"
    if run.members.enough and low <= len(run.members):
        wanted = replace(run.job, nnodes=f"{low}:{high}")
        if not run.members.enough_within(wanted):
            size = f"a number of workers that is a multiple of {run.job.multiple_of}"
            return f"no {low} to {high} of the {count(len(run.members), 'node')} have {size}"
    return _why_undisturbed(run)


def handle_request(run: Run, event: RequestEvent) -> list[Action]:
    """Do what a person or a signal requests, unless it is refused."""
    match event:
        case ForwardRequested():
            return _forward_requested(run, event)
        case StopRequested():
            return _stop_requested(run, event)
        case _ if refusal(run, event):
            return []
        case RestartRequested():
            return _restart_requested(run, event)
        case ResizeRequested():
            return _resize_requested(run, event)
        case _:
            return assert_never(event)


def _forward_requested(run: Run, event: ForwardRequested) -> list[Action]:
    held = run.world.held_signals
    if isinstance(run.state, Running):
        return [forward(run, event.signal)]
    if isinstance(run.state, Starting) and event.signal not in held:
        held.append(event.signal)  # some workers may run already, and the sender may have seen them
    return []


def _stop_requested(run: Run, event: StopRequested) -> list[Action]:
    is_in_time = event.save_seconds and not event.by
    code = ExitCode.RESUMABLE if is_in_time else signal_exit_code(signals.Signals[event.signal])
    why = requested(event)
    ending = Finish(exit_code=code, why=f"stopped by {event.by or event.signal}")
    match run.state:
        case Gathering():
            return run.finish(ending.exit_code, ending.why)
        case Stopping() as stopping:
            return _stop_requested_again(run, stopping, event, ending)
        case Saving(signalled=True) if is_in_time:
            return stop_with_grace(run, f"{event.signal} again", ending=ending)
        case Running() | Saving() if event.save_seconds:
            actions = end_run(run, why, ending, seconds=event.save_seconds)
            if isinstance(run.state, Saving):
                run.state.signalled |= not event.by
            return actions
        case _:
            ending = (run.state.ending if isinstance(run.state, Saving) and event.by else None) or ending
            grace = 0.0 if event.now else run.job.shutdown_timeout
            return stop_world(run, why, grace=grace, ending=ending, signal=event.signal)


def _stop_requested_again(run: Run, state: Stopping, event: StopRequested, ending: Finish) -> list[Action]:
    """Make the run end after the present attempt. A second signal kills the workers, as `now` does."""
    is_second = state.ending is not None and not event.by
    if not (event.now or is_second):
        return end_after_stop(run, state, ending)
    why = f"{requested(event)} now" if event.by else f"{event.signal} again"
    stop = Stop(attempt=run.world.attempt, nodes=run.present_nodes(), grace=0.0, why=why)
    ending = state.ending or ending
    return [stop, *run.finish(ending.exit_code, ending.why)]


def _restart_requested(run: Run, event: RestartRequested) -> list[Action]:
    why = requested(event)
    match run.state:
        case Gathering() as gathering:
            gathering.backoff_until, gathering.last_call = None, run.now
            return gather(run, gathering, why)
        case Stopping() as stopping:
            stopping.backoff_until = None
            return []
        case Running() if event.save_seconds:
            return save_world(run, why, seconds=event.save_seconds)
        case Starting() if event.save_seconds:
            return replace_world(run, why)
        case Saving() if not event.save_seconds:
            return stop_world(run, why, grace=0.0)
        case Starting() | Running():
            return restart_world(run, why, all_anew=True)
        case _:
            return []


def _resize_requested(run: Run, event: ResizeRequested) -> list[Action]:
    """Take the new bounds. MIN holds once that number of nodes is there: until then the run goes on with fewer."""
    low, high = event.min_nodes, event.max_nodes
    why = requested(event)
    run.wanted_nodes = low
    run.set_bounds(low if low <= len(run.members) else min(low, run.job.min_nodes), high)
    scale = Scale(nodes=high + run.job.spares, why=why)
    return [scale, *_resized(run, why)]


def _resized(run: Run, why: str) -> list[Action]:
    match run.state:
        case Gathering() as gathering:
            return gather(run, gathering, why)
        case Starting() if _is_too_large(run):
            return replace_world(run, why)
        case Running() if _is_too_large(run):
            return save_world(run, why)
        case Starting() | Running() as state:
            return [*release_surplus(run), *plan_resize(run, state, why)]
        case _:
            return []


def _is_too_large(run: Run) -> bool:
    return len(run.world.roster) > run.job.max_nodes and run.members.enough
