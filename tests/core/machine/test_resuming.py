"""What another driver makes of the last one's state, and of what the nodes say."""

from __future__ import annotations

import pytest

from raylaunch.core.machine.resuming import heard
from raylaunch.core.machine.state import Phase
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from tests.core.machine_helpers import (
    failed,
    finished,
    gathering_machine,
    handle_all,
    job,
    joined,
    launch,
    replaced,
    restart_requested,
    running_machine,
    start_all_workers,
    started,
    stop_command,
    stop_requested,
    stopped,
)


def worker_exit(rank=1):
    return WorkerExit(attempt=1, rank=rank, local_rank=rank, pid=4242, exit_code=-9, at=1.0)


RUNS = WorkersStatus(attempt=1, pids=(1, 2))


def starting_machine(*nodes):
    machine = gathering_machine(job(len(nodes)))
    handle_all(machine, *(joined(node, 1.0) for node in nodes))
    assert machine.phase is Phase.STARTING
    return machine


def test_while_there_is_no_world_nothing_matters():
    machine = gathering_machine(job(2))
    assert heard(machine.run, "a", RUNS) == WorkersStatus(attempt=1)


def test_a_node_that_is_not_in_the_world():
    assert heard(running_machine("a").run, "b", RUNS) == WorkersStatus(attempt=2)


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_status_of_another_attempt(attempt):
    """All that it says of the attempt of the world is new."""
    assert heard(running_machine("a").run, "a", WorkersStatus(attempt=attempt, pids=(1, 2))) == WorkersStatus(attempt=1)


def test_workers_that_were_reported_as_started():
    """That one node of two has them is news only where the last driver still awaited it."""
    machine = starting_machine("a", "b")
    handle_all(machine, started("a", 2.0))
    assert heard(machine.run, "a", RUNS) == RUNS
    assert heard(machine.run, "b", RUNS) == WorkersStatus(attempt=1)


def test_failures_that_were_dealt_with():
    """The status names all of the attempt; the last driver knew the first of them."""
    machine = starting_machine("a", "b")
    handle_all(machine, started("a", 2.0), started("b", 2.0), failed("a", 3.0))
    assert machine.attempt == 1
    both = WorkersStatus(attempt=1, pids=(1, 2), failures=(worker_exit(), worker_exit(0)))
    assert heard(machine.run, "a", both).failures == (worker_exit(),)
    assert heard(machine.run, "b", both).failures == ()


def test_a_success_that_was_dealt_with():
    machine = running_machine("a", "b")
    handle_all(machine, finished("a", 2.0))
    done = WorkersStatus(attempt=1, pids=(1, 2), succeeded=True)
    assert heard(machine.run, "a", done).succeeded
    assert not heard(machine.run, "b", done).succeeded


def test_workers_that_have_saved():
    machine = running_machine("a", "b")
    handle_all(machine, stop_command(2.0))
    assert machine.phase is Phase.SAVING
    saved = WorkersStatus(attempt=1, pids=(1, 2), has_saved=True, saved=7)
    assert not heard(machine.run, "a", saved).has_saved
    machine.state.awaited.discard("a")
    assert heard(machine.run, "a", saved).has_saved


def test_workers_that_have_stopped():
    machine = running_machine("a", "b")
    handle_all(machine, stop_requested("SIGTERM", 2.0), stopped("a", 3.0))
    assert machine.phase is Phase.STOPPING
    gone = WorkersStatus(attempt=1, pids=(1, 2), stopped=())
    assert heard(machine.run, "a", gone).stopped == ()
    assert heard(machine.run, "b", gone).stopped is None
    assert heard(running_machine("a").run, "a", gone).stopped is None


def test_workers_that_can_stay():
    machine = running_machine("a", "b")
    machine.run.world.elastic.add("a")
    stay = WorkersStatus(attempt=1, pids=(1, 2), can_stay=True)
    assert heard(machine.run, "a", stay).can_stay
    assert not heard(machine.run, "b", stay).can_stay


def test_the_same_attempt_goes_on():
    """Its timer was of the last driver's process: it is set again."""
    machine = starting_machine("a", "b")
    (timer,) = handle_all(machine, replaced(2.0, attempt=1))
    assert timer.at == machine.state.deadline
    assert timer.why == "another driver has taken over"
    start_all_workers(machine, at=3.0)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 1)


WHY = "the last driver has died before it had told all nodes of attempt 3"


@pytest.mark.parametrize("machine", [lambda: running_machine("a", "b"), lambda: starting_machine("a", "b")])
def test_an_attempt_that_the_ledger_has_not(machine):
    """Some node may know of it: the next one has a higher number. It spends no restart."""
    machine = machine()
    actions = handle_all(machine, replaced(2.0, attempt=3))
    assert launch(4, "a", "b", why=WHY) in actions
    assert machine.restarts == 0


def test_an_attempt_that_the_ledger_has_not_while_all_save():
    """What the last driver awaited can be over on some nodes: they are stopped, and the next attempt follows."""
    machine = running_machine("a", "b")
    handle_all(machine, restart_requested(2.0))
    assert machine.phase is Phase.SAVING
    assert WHY in [action.why for action in handle_all(machine, replaced(3.0, attempt=3))]
    assert machine.phase is Phase.STOPPING
    assert launch(4, "a", "b", why=WHY) in handle_all(machine, stopped("a", 4.0), stopped("b", 4.0))


def test_an_attempt_that_the_ledger_has_not_while_workers_stop():
    """They go on to stop."""
    machine = running_machine("a", "b")
    handle_all(machine, stop_requested("SIGTERM", 2.0))
    handle_all(machine, replaced(3.0, attempt=3))
    assert machine.phase is Phase.STOPPING
    assert machine.run.world.told_attempt == 3
