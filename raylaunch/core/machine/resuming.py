"""What follows when another driver goes on with a run, whose state is in the last one's ledger.

Statuses of nodes tell what is true. `heard` is what the last driver knew of it, so that each event happens once.
"""

from __future__ import annotations

from dataclasses import replace

from raylaunch.core.machine.events_and_actions import Action, DriverReplaced
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.saving import end_saving
from raylaunch.core.machine.state import Gathering, Running, Saving, Starting, Stopping
from raylaunch.core.machine.transitions import restart_world
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.core.newtypes import NodeId


def heard(run: Run, node: NodeId, status: WorkersStatus) -> WorkersStatus:
    """Return what of the status of a node's workers the run has dealt with: `observe` makes events of the rest.

    Of an attempt that is over for this node, nothing matters any more.
    """
    world, state = run.world, run.state
    if isinstance(state, Gathering) or node not in world.nodes:
        return WorkersStatus(attempt=world.attempt + 1)
    if status.attempt != world.attempt:
        return WorkersStatus(attempt=world.attempt)
    awaited = state.awaited if isinstance(state, Starting | Saving | Stopping) else set()
    failed = sum(one.node == node and not (one.hung or one.stopped) for one in world.failures)
    known = replace(
        status,
        can_stay=status.can_stay and node in world.elastic,
        failures=status.failures[:failed],
        succeeded=status.succeeded and node not in world.unfinished,
        has_saved=status.has_saved and not (isinstance(state, Saving) and node in awaited),
        stopped=status.stopped if isinstance(state, Stopping) and node not in awaited else None,
    )
    return replace(known, pids=None) if isinstance(state, Starting) and node in awaited else known


def driver_replaced(run: Run, event: DriverReplaced) -> list[Action]:
    """Go on as before; or with an attempt after each that nodes were told of, if the ledger has not the newest of them.

    That spends no restart.
    """
    run.timing.timer_at = None  # it was of the last driver's process
    if event.attempt > run.world.attempt:
        run.world.told_attempt = event.attempt
        why = f"the last driver has died before it had told all nodes of attempt {event.attempt}"
        match run.state:
            case Starting() | Running():
                return restart_world(run, why, all_anew=True)
            case Saving() as saving:
                return end_saving(run, saving, why)
            case _:
                pass
    return run.set_timer("another driver has taken over")
