"""Which nodes' workers stay when the next attempt begins, and what follows if there is nothing they can go on from."""

from __future__ import annotations

import pytest
from machine_helpers import (
    checkpointed,
    drain_requested,
    draining,
    failed,
    handle_all,
    joined,
    lost,
    resize_requested,
    restart_requested,
    running_machine,
    stop_command,
    stopped,
    tick,
)

from raylaunch.core.machine.events_and_actions import (
    Action,
    Launch,
    Release,
    RestartRequested,
    Stop,
    WorkersElastic,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase


def elastic(node: str, attempt: int = 1) -> WorkersElastic:
    return WorkersElastic(at=2.0, attempt=attempt, node=node)


def started(node: str, attempt: int, stayed: int = 0) -> WorkersStarted:
    return WorkersStarted(at=4.0, attempt=attempt, node=node, stayed=stayed)


def stuck(at: float = 5.0) -> RestartRequested:
    """The survivors have nothing to restore."""
    return restart_requested(at, save_seconds=0.0)


def launch_of(actions: list[Action]) -> Launch:
    return next(action for action in actions if isinstance(action, Launch))


def launched(machine: Machine, *events) -> Launch:
    return launch_of(handle_all(machine, *events))


def test_workers_that_can_stay_do_so_after_a_failure():
    """Node b has not said that it can: its workers prepare themselves yet."""
    machine = running_machine("a", "b", max_restarts=3)
    order = launched(machine, elastic("a"), failed("b", 3.0))
    assert order.staying == ("a",)
    assert order.roster == ("a", "b")


def test_they_stay_again_when_the_next_attempt_fails_before_they_have_said_so():
    """As when a worker dies while the others recover."""
    machine = running_machine("a", "b", max_restarts=3)
    launched(machine, elastic("a"), elastic("b"), failed("b", 3.0))
    assert launched(machine, failed("a", 4.0, attempt=2)).staying == ("a", "b")


def test_those_that_were_started_again_have_to_say_so_again():
    machine = running_machine("a", "b", max_restarts=3)
    handle_all(machine, elastic("a"), elastic("b"), failed("b", 3.0))
    handle_all(machine, started("a", 2, stayed=2), started("b", 2))
    assert launched(machine, failed("a", 5.0, attempt=2)).staying == ("a",)


def test_those_of_the_other_nodes_stay_when_a_node_is_lost():
    machine = running_machine("a", "b", nnodes="1:2")
    order = launched(machine, elastic("a"), elastic("b"), lost("a", 3.0))
    assert (order.roster, order.staying) == (("b",), ("b",))


def test_they_stay_when_a_node_joins_at_the_restart():
    """All that the others hold is still there."""
    machine = running_machine("a", "b", nnodes="2:4", max_restarts=3, last_call=100.0)
    order = launched(machine, elastic("a"), elastic("b"), joined("c", 3.0), failed("b", 4.0))
    assert (order.roster, order.staying) == (("a", "b", "c"), ("a", "b"))


def saved(*nodes: str) -> list:
    return [checkpointed(node, 6.0) for node in nodes]


def test_they_stay_when_a_node_joins():
    """No worker gets a signal: all wait at the commit after which they are to stop."""
    machine = running_machine("a", "b", nnodes="2:3")
    assert not any(isinstance(one, Stop | Launch) for one in handle_all(machine, elastic("a"), joined("c", 3.0)))
    actions = handle_all(machine, *saved("a", "b"))
    order = launch_of(actions)
    assert (order.roster, order.staying) == (("a", "b", "c"), ("a",))
    assert [action for action in actions if isinstance(action, Stop)] == [
        Stop(attempt=1, nodes=("a", "b"), grace=0.0, why=order.why)
    ]


def test_they_stay_when_a_node_is_drained_and_that_one_is_released():
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, elastic("a"), elastic("b"), draining("a", 3.0))
    assert machine.phase is Phase.SAVING
    actions = handle_all(machine, *saved("a", "b"))
    assert (launch_of(actions).roster, launch_of(actions).staying) == (("b",), ("b",))
    assert [action.node for action in actions if isinstance(action, Release)] == ["a"]


@pytest.mark.parametrize("event", [resize_requested(1, 1, 3.0), drain_requested("b", 3.0)])
def test_they_stay_when_a_person_requests_fewer_nodes(event):
    machine = running_machine("a", "b", nnodes="1:2")
    order = launched(machine, elastic("a"), elastic("b"), event, *saved("a", "b"))
    assert (order.roster, order.staying) == (("a",), ("a",))


def test_they_stay_when_fewer_nodes_are_requested_while_the_attempt_begins():
    """Its workers have done nothing yet, so there is nothing to save."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=3)
    handle_all(machine, elastic("a"), elastic("b"), failed("b", 3.0))
    assert machine.phase is Phase.STARTING
    order = launched(machine, resize_requested(1, 1, 5.0))
    assert (order.attempt, order.roster, order.staying) == (3, ("a",), ("a",))


@pytest.mark.parametrize("event", [failed("b", 5.0), lost("b", 5.0)])
def test_they_stay_when_others_fail_while_all_save(event):
    machine = running_machine("a", "b", nnodes="1:3")
    order = launched(machine, elastic("a"), elastic("b"), joined("c", 3.0), event)
    assert (order.attempt, order.staying[0]) == (2, "a")


def test_they_stay_when_a_person_requests_a_restart():
    machine = running_machine("a", nnodes=1)
    assert launched(machine, elastic("a"), restart_requested(3.0), *saved("a")).staying == ("a",)


def test_none_stays_when_a_person_requests_a_restart_without_saving():
    """New processes are what is wanted."""
    machine = running_machine("a", nnodes=1)
    assert launched(machine, elastic("a"), restart_requested(3.0, save_seconds=0.0)).staying == ()


def test_none_stays_when_the_run_ends():
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, elastic("a"), elastic("b"), stop_command(3.0), *saved("a", "b"))
    assert machine.phase is Phase.STOPPING


def test_all_are_started_again_if_there_is_no_commit_from_which_they_could_go_on():
    """A node was lost before what it held was copied."""
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, elastic("a"), elastic("b"), lost("b", 3.0), started("a", 2, stayed=2))
    order = launched(machine, stuck())
    assert (order.attempt, order.roster, order.staying, machine.restarts) == (3, ("a",), (), 0)


def test_all_are_started_again_also_if_the_nodes_do_not_know_yet_that_the_others_have_begun():
    machine = running_machine("a", "b", max_restarts=3)
    handle_all(machine, elastic("a"), failed("b", 3.0), started("a", 2, stayed=2))
    assert machine.phase is Phase.STARTING
    assert launched(machine, stuck()).staying == ()


def test_all_are_started_again_if_a_planned_change_waits_for_those_that_cannot_go_on():
    machine = running_machine("a", "b", nnodes="2:3", max_restarts=3)
    handle_all(machine, elastic("a"), failed("b", 3.0), started("a", 2, stayed=2), started("b", 2), joined("c", 4.0))
    assert machine.phase is Phase.SAVING
    handle_all(machine, stuck())
    assert machine.phase is Phase.STOPPING
    assert launched(machine, *(stopped(node, 6.0, attempt=2) for node in ("a", "b"))).staying == ()


def test_a_person_is_told_how_many_have_stayed():
    machine = running_machine("a", "b", max_restarts=3)
    handle_all(machine, elastic("a"), elastic("b"), failed("b", 3.0))
    handle_all(machine, started("a", 2, stayed=2), started("b", 2, stayed=1))
    assert machine.status == "4 workers on 2 nodes; 3 of 4 workers stayed"


def test_the_nodes_that_leave_are_known_while_all_save():
    """What they hold has to be copied to others before."""
    machine = running_machine("a", "b", "c", nnodes="1:3")
    assert machine.leaving == set()
    handle_all(machine, elastic("a"), resize_requested(1, 2, 3.0))
    assert (machine.phase, machine.leaving) == (Phase.SAVING, {"c"})


@pytest.mark.parametrize("event", [joined("c", 3.0), stop_command(3.0), restart_requested(3.0)])
def test_none_leaves_before_a_node_joins_a_restart_or_the_end_of_the_run(event):
    machine = running_machine("a", "b", nnodes="1:3")
    handle_all(machine, event)
    assert (machine.phase, machine.leaving) == (Phase.SAVING, set())


def test_a_node_that_is_drained_leaves_though_all_go_on_until_another_comes():
    machine = running_machine("a", "b")
    handle_all(machine, draining("a", 3.0))
    assert (machine.phase, machine.leaving) == (Phase.RUNNING, {"a"})


def test_the_nodes_that_replace_all_others_are_known_while_these_save_and_are_those_of_the_next_world():
    """They get copies of the last commit, so one that joins later does not take their place."""
    machine = running_machine("b", nnodes=1)
    handle_all(machine, draining("b", 3.0))
    assert (machine.phase, machine.world.replacements) == (Phase.RUNNING, ())
    handle_all(machine, joined("c", 4.0))
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ("c",))
    handle_all(machine, joined("a", 5.0), *saved("b"))
    assert launched(machine, stopped("b", 7.0)).roster == ("c",)
    assert machine.world.replacements == ()


@pytest.mark.parametrize("event", [draining("c", 5.0), lost("c", 5.0)])
def test_a_node_that_replaces_all_others_is_replaced_if_it_goes_itself(event):
    machine = running_machine("b", nnodes=1, spares=1)
    handle_all(machine, joined("c", 1.0), joined("d", 1.0), draining("b", 3.0))
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ("c",))
    handle_all(machine, event)
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ("d",))


def test_nodes_replace_all_others_if_the_last_of_these_is_drained_while_all_save():
    machine = running_machine("a", "b", nnodes="2:3")
    handle_all(machine, joined("c", 3.0))
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ())
    handle_all(machine, joined("d", 3.5), draining("a", 4.0))
    assert (machine.leaving, machine.world.replacements) == ({"a"}, ())
    handle_all(machine, draining("b", 5.0))
    assert (machine.leaving, machine.world.replacements) == ({"a", "b"}, ("c", "d"))


def test_no_node_replaces_others_of_which_one_stays_or_if_none_is_there():
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, draining("a", 3.0))
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ())
    machine = running_machine("a", nnodes=1)
    handle_all(machine, draining("a", 3.0, deadline=60.0), tick(60.0))
    assert (machine.phase, machine.world.replacements) == (Phase.SAVING, ())
