"""What follows when workers start, progress, save, fail, hang or end."""

from __future__ import annotations

from raylaunch.core.failures.failure import Failure, root_cause
from raylaunch.core.machine.events_and_actions import (
    Action,
    Finish,
    ForwardSignal,
    Progressed,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersElastic,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.nodes import cordon_host_of
from raylaunch.core.machine.restart_policy import Refusal, came_from_outside
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.saving import end_saving, stop_if_all_saved, stop_unsaved
from raylaunch.core.machine.state import Running, Saving, Starting, Stopping
from raylaunch.core.machine.transitions import go_on_if_all_stopped, restart_world, stop_world
from raylaunch.core.newtypes import NO_HOST, SignalName, assert_never
from raylaunch.errors import ExitCode

MAX_HANG_GRACE = 5.0
"""Seconds of grace at most for the workers of a world that hangs, before the run ends."""


def workers_changed(run: Run, event: WorkerEvent | WorkersHung) -> list[Action]:
    """Handle what a node reports of its workers."""
    match event:
        case WorkersStarted():
            return _workers_started(run, event)
        case WorkersElastic():
            run.world.elastic.add(event.node)
            return []
        case WorkersExited():
            return _workers_exited(run, event)
        case WorkersStopped():
            return _workers_stopped(run, event)
        case WorkersCheckpointed():
            return _workers_checkpointed(run, event)
        case WorkersHung():
            return _workers_hung(run, event)
        case _:
            return assert_never(event)


def _workers_started(run: Run, event: WorkersStarted) -> list[Action]:
    if not isinstance(run.state, Starting):
        return []
    run.state.awaited.discard(event.node)
    run.world.stayed += event.stayed
    if not event.stayed:
        run.world.elastic.discard(event.node)
    return _run_if_all_started(run, run.state)


def _run_if_all_started(run: Run, state: Starting) -> list[Action]:
    if state.awaited:
        return []
    run.enter(Running(status=f"{run.workers_and_nodes}{run.world.survivors}", resize=state.resize))
    held, run.world.held_signals = run.world.held_signals, []
    return [*(forward(run, signal) for signal in held), *run.set_timer("more nodes may come")]


def forward(run: Run, signal: SignalName) -> Action:
    """Pass a signal on to the workers."""
    nodes = run.world.running_nodes
    return ForwardSignal(attempt=run.world.attempt, nodes=nodes, signal=signal, why=f"{signal} received")


def _workers_exited(run: Run, event: WorkersExited) -> list[Action]:
    run.world.failures.extend(event.failures)
    if isinstance(run.state, Stopping):
        return []
    if event.failures:
        return _workers_failed(run, root_cause(event.failures) or event.failures[0])
    run.world.finishing = True
    run.world.unfinished.discard(event.node)
    if not run.world.unfinished:
        size = run.world.size
        return run.finish(ExitCode.OK, "the worker finished" if size == 1 else f"all {size} workers finished")
    match run.state:
        case Starting() as starting:
            starting.awaited.discard(event.node)
            return _run_if_all_started(run, starting)
        case Saving() as saving:
            saving.awaited.discard(event.node)
            return stop_if_all_saved(run, saving)
        case _:
            return []


def _workers_hung(run: Run, event: WorkersHung) -> list[Action]:
    cause = root_cause(event.failures)
    if cause is None or not isinstance(run.state, Running | Saving):
        return []
    run.world.failures.extend(event.failures)
    return _workers_failed(run, cause)


def _workers_failed(run: Run, cause: Failure) -> list[Action]:
    what = f"rank {cause.rank} on {cause.node} {cause.what}"
    if isinstance(run.state, Saving):  # the world was to end in any case
        return end_saving(run, run.state, what)
    if drained := _drained_node_that_explains(run, cause):
        return restart_world(run, f"{what}; {drained} is being drained")
    delay = run.crashes.delay(cause, run.now - run.world.launched_at)
    member = None if cause.is_collateral else run.nodes.get(cause.node)
    host = NO_HOST if member is None else member.host
    bad = run.health.blame(host, run.now, cause.kind)
    needed = bad and not run.members.enough_without(host)
    if refused := run.budget.spend(cause, run.now, run.world.nodes, elsewhere=bad and not needed):
        return _end_run_for(run, cause, what, refused)
    cordon, clause = cordon_host_of(run, member, needed=needed) if bad and member is not None else ([], "")
    if delay:
        clause += f"; after {delay:g} s, since it crashes again and again"
    backoff_until = run.now + delay if delay else None
    return [*cordon, *restart_world(run, f"{what}; {run.budget}{clause}", backoff_until=backoff_until)]


def _end_run_for(run: Run, cause: Failure, what: str, refused: Refusal) -> list[Action]:
    why = f"{what}; {refused.why}"
    code = ExitCode.POINTLESS if refused.is_pointless else ExitCode.JOB_FAILED
    # Workers that hang do not react to a signal; workers that wait for them may.
    grace = min(run.job.shutdown_timeout, MAX_HANG_GRACE) if cause.hung else run.job.shutdown_timeout
    return stop_world(run, why, grace=grace, ending=Finish(exit_code=code, why=why))


def _drained_node_that_explains(run: Run, cause: Failure) -> str:
    """Return a drained node of the world that took its workers along, if that explains the failure; else ""."""
    suspects = run.world.roster if cause.is_collateral else (cause.node,) if came_from_outside(cause) else ()
    return next((node for node in suspects if node in run.nodes and run.nodes[node].draining), "")


def _workers_stopped(run: Run, event: WorkersStopped) -> list[Action]:
    run.world.failures.extend(event.failures)
    if not isinstance(run.state, Stopping):
        return []
    run.state.awaited.discard(event.node)
    return go_on_if_all_stopped(run, run.state)


def _workers_checkpointed(run: Run, event: WorkersCheckpointed) -> list[Action]:
    if not isinstance(run.state, Saving) or event.node not in run.world.unfinished:
        return []  # a node whose workers have finished answers that none of them can save
    if event.step is None:  # only a signal reaches such a script
        if _is_left_to_finish(run, run.state):
            return []
        return stop_unsaved(run, run.state, f"workers of {event.node} do not call `should_checkpoint`")
    run.state.awaited.discard(event.node)
    run.state.step = event.step
    return stop_if_all_saved(run, run.state)


def _is_left_to_finish(run: Run, state: Saving) -> bool:
    """Whether workers get no signal before the deadline, since all workers of some node have finished.

    A drained node and the end of the run do not wait for that.
    """
    return run.world.finishing and state.ending is None and run.world.deadline is None


def progressed(run: Run, event: Progressed) -> list[Action]:
    """A script that makes steps does not crash in a loop, and from its second step on its nodes reach each other.

    The first step proves nothing: a script may call `heartbeat()` once before its first collective.
    """
    run.crashes.progressed()
    for step in (event.saved, event.committed and event.committed - 1):
        if step is not None:
            run.budget.saved(step)
    if event.marks > 1:
        run.world.has_progressed = run.reachability.proven = True
        run.reachability.broken_since = None
    run.timing.save.reported(event.slowest_save, event.rate)
    return run.set_timer("a save takes another time than before") if run.timing.deadline is not None else []
