"""The decisions of the machine about planned restarts: nodes join or are drained, and the workers save first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import (
    checkpointed,
    draining,
    failed,
    finished,
    forward_requested,
    gathering_machine,
    handle_all,
    job,
    joined,
    launch,
    lost,
    raised,
    report_unsaved,
    request_checkpoint,
    restart_requested,
    running_machine,
    saving_timer,
    start_all_workers,
    start_timer,
    started,
    stop,
    stop_requested,
    stopped,
    stopping_timer,
    tick,
    uncordon,
)

from raylaunch.core.machine.events_and_actions import Finish, ForwardSignal, Release, ReportUnsaved, SetTimer
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase

DRAIN_B = "b is being drained: spot"


def release_drained(node: str, *, frees_memory: bool = True) -> Release:
    return Release(node=node, why="it is being drained", frees_memory=frees_memory)


def saving_machine(*nodes: str, at: float = 10.0, **settings: object) -> Machine:
    """Return a machine in SAVING: b, which is not needed, is being drained."""
    machine = running_machine(*nodes, **({"nnodes": f"1:{len(nodes)}"} | settings))
    handle_all(machine, draining("b", at))
    assert machine.phase is Phase.SAVING
    return machine


# A planned resize.


def test_all_workers_save_before_they_are_stopped():
    """All nodes are asked to save; when the last has saved, all are stopped together with the usual grace."""
    machine = running_machine("a", "b", "c", nnodes="2:3")
    assert handle_all(machine, draining("b", 10.0)) == [
        request_checkpoint(1, "a", "b", "c", why=DRAIN_B),
        saving_timer(610.0),
    ]
    assert (machine.phase, machine.status) == (Phase.SAVING, DRAIN_B)
    assert handle_all(machine, checkpointed("a", 11.0), checkpointed("c", 11.1)) == []
    assert handle_all(machine, checkpointed("b", 11.2)) == [
        stop(1, "a", "b", "c", grace=30.0, why=DRAIN_B),
        stopping_timer(161.2),
    ]
    assert handle_all(machine, stopped("a", 12.0), stopped("b", 12.0)) == []
    assert handle_all(machine, stopped("c", 13.0)) == [
        launch(2, "a", "c", why=DRAIN_B),
        release_drained("b"),
        start_timer(133.0),
    ]
    assert machine.restarts == 0


def test_script_without_should_checkpoint_is_stopped_at_once():
    """One node that reports no `should_checkpoint` is enough: waiting for others would shorten the grace."""
    machine = saving_machine("a", "b")
    assert handle_all(machine, checkpointed("a", 10.1, step=None)) == [
        ReportUnsaved(attempt=1, why="workers of a do not call `should_checkpoint`"),
        stop(1, "a", "b", grace=30.0, why=DRAIN_B),
        stopping_timer(160.1),
    ]


def test_workers_that_do_not_save_in_time_are_stopped():
    """After the 600 s of SAVING all workers are stopped with their grace; those that have not saved are named."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 12.0))
    assert handle_all(machine, tick(610.0)) == [
        report_unsaved("b"),
        stop(1, "a", "b", grace=30.0, why=DRAIN_B),
        stopping_timer(760.0),
    ]


def test_saving_lasts_at_least_shutdown_timeout():
    """A `shutdown_timeout` above 600 s is also the limit of SAVING."""
    machine = running_machine("a", "b", nnodes="1:2", shutdown_timeout=900.0)
    assert handle_all(machine, draining("b", 10.0)) == [
        request_checkpoint(1, "a", "b", why=DRAIN_B),
        saving_timer(910.0),
    ]


def test_zero_shutdown_timeout_does_not_shorten_saving():
    """The grace is the time between two signals; SAVING comes before the first of them."""
    machine = running_machine("a", "b", nnodes="1:2", shutdown_timeout=0.0)
    assert handle_all(machine, draining("b", 10.0)) == [
        request_checkpoint(1, "a", "b", why=DRAIN_B),
        saving_timer(610.0),
    ]
    assert handle_all(machine, tick(610.0)) == [
        report_unsaved("a", "b"),
        stop(1, "a", "b", grace=0.0, why=DRAIN_B),
        stopping_timer(730.0),
    ]


def test_late_checkpoints_are_ignored():
    """In STOPPING, reports of checkpoints change nothing."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 10.1, step=None))
    assert handle_all(machine, checkpointed("b", 10.2), checkpointed("b", 10.3, step=None)) == []
    assert machine.state.awaited == {"a", "b"}


def test_stop_report_while_saving_is_ignored():
    """`WorkersStopped` without an order to stop changes nothing."""
    machine = saving_machine("a", "b")
    assert handle_all(machine, stopped("a", 11.0)) == []
    assert machine.state.awaited == {"a", "b"}


def test_node_lost_while_others_save():
    """The other workers wait for the lost node in their steps and cannot save: all are stopped without grace."""
    machine = saving_machine("a", "b", "c")
    handle_all(machine, checkpointed("a", 10.5))
    why = "c was lost: its agent died"
    assert handle_all(machine, lost("c", 11.0)) == [stop(1, "a", "b", grace=0.0, why=why), stopping_timer(131.0)]
    assert handle_all(machine, stopped("a", 12.0), stopped("b", 12.0))[0] == launch(2, "a", why=why)
    assert machine.restarts == 0


def test_last_unsaved_node_is_lost():
    """The others have saved, and are stopped without grace."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 10.5))
    assert handle_all(machine, lost("b", 11.0))[0] == stop(1, "a", grace=0.0, why="b was lost: its agent died")


def test_finished_node_lost_while_others_save():
    """A node that finished is not asked to save, and its loss changes nothing."""
    machine = running_machine("a", "b", "c", nnodes="1:3")
    handle_all(machine, finished("c", 5.0))
    assert handle_all(machine, draining("b", 10.0))[0] == request_checkpoint(1, "a", "b", why=DRAIN_B)
    assert machine.state.awaited == {"a", "b"}
    assert handle_all(machine, lost("c", 11.0)) == []
    assert machine.state.awaited == {"a", "b"}


def test_worker_fails_while_others_save():
    """The attempt was to be replaced anyway: it is stopped without grace, and no restart is spent."""
    machine = saving_machine("a", "b", max_restarts=1)
    why = "rank 1 on a was killed by SIGKILL"
    assert handle_all(machine, failed("a", 11.0)) == [stop(1, "a", "b", grace=0.0, why=why), stopping_timer(131.0)]
    handle_all(machine, stopped("a", 11.1))
    assert handle_all(machine, stopped("b", 11.1))[0] == launch(2, "a", why=why)
    assert (machine.restarts, len(machine.world.failures)) == (0, 0)


def test_node_finishes_while_others_save():
    """A node that finishes is not awaited; the checkpoints of the others are enough."""
    machine = saving_machine("a", "b")
    assert handle_all(machine, finished("a", 11.0)) == []
    assert handle_all(machine, checkpointed("b", 11.1)) == [
        stop(1, "a", "b", grace=30.0, why=DRAIN_B),
        stopping_timer(161.1),
    ]


def test_finished_node_that_declines_to_save():
    """A node whose workers have all finished answers that none of them can save: the others go on to their end."""
    machine = running_machine("a", "b", nnodes="1:3")
    handle_all(machine, joined("c", 10.0))
    assert handle_all(machine, finished("a", 10.1), checkpointed("a", 10.1, step=None)) == []
    assert (machine.phase, machine.state.awaited) == (Phase.SAVING, {"b"})
    assert handle_all(machine, finished("b", 11.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_others_go_on_after_a_node_has_finished_while_saving():
    """Those that save are stopped for the next attempt, and so are those that do neither until the deadline."""
    machine = running_machine("a", "b", nnodes="1:3")
    handle_all(machine, joined("c", 10.0), finished("a", 10.1), checkpointed("a", 10.1, step=None))
    assert handle_all(machine, checkpointed("b", 11.0))[0] == stop(1, "a", "b", grace=30.0, why="c joined")
    machine = running_machine("a", "b", nnodes="1:3")
    handle_all(machine, joined("c", 10.0), finished("a", 10.1), checkpointed("a", 10.1, step=None))
    assert handle_all(machine, tick(610.0))[:2] == [report_unsaved("b"), stop(1, "a", "b", grace=30.0, why="c joined")]


def test_script_without_should_checkpoint_that_is_about_to_finish():
    """When workers of a node have finished, the others are not stopped for nodes that join before the deadline."""
    machine = running_machine("a", "b", nnodes="1:3")
    assert handle_all(machine, joined("c", 10.0), finished("a", 10.1), checkpointed("b", 10.2, step=None))[2:] == []
    assert handle_all(machine, finished("b", 11.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_script_without_should_checkpoint_that_is_about_to_finish_on_a_drained_node():
    """The time that the node has is for the grace."""
    machine = saving_machine("a", "b", "c")
    assert handle_all(machine, finished("a", 10.1), checkpointed("b", 10.2, step=None))[1] == stop(
        1, "a", "b", "c", grace=30.0, why=DRAIN_B
    )


def test_last_unsaved_node_finishes():
    """The nodes that have saved are stopped for the next attempt."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 11.0))
    assert handle_all(machine, finished("b", 11.1))[0] == stop(1, "a", "b", grace=30.0, why=DRAIN_B)


def test_all_nodes_finish_while_saving():
    """If all workers finish instead of saving, the run ends with exit code 0."""
    machine = saving_machine("a", "b")
    assert handle_all(machine, finished("a", 11.0), finished("b", 11.1)) == [
        Finish(exit_code=0, why="all 4 workers finished")
    ]


def test_stop_request_while_saving():
    """The user's signal is sent at once, without waiting for further checkpoints."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 10.5))
    assert handle_all(machine, stop_requested("SIGTERM", 11.0)) == [
        stop(1, "a", "b", grace=30.0, why="SIGTERM received"),
        stopping_timer(51.0),
    ]
    assert handle_all(machine, stopped("a", 12.0), stopped("b", 12.0)) == [
        Finish(exit_code=143, why="stopped by SIGTERM")
    ]


def test_signals_are_not_forwarded_while_saving():
    """Workers that save are about to be stopped, so signals are not forwarded to them."""
    assert handle_all(saving_machine("a", "b"), forward_requested("SIGUSR1", 11.0)) == []


def test_nodes_that_join_while_saving_take_part_in_the_next_attempt():
    """They wait for no last call."""
    machine = saving_machine("a", "b", nnodes="1:3")
    assert handle_all(machine, joined("c", 10.5), checkpointed("a", 11.0)) == []
    handle_all(machine, checkpointed("b", 11.0), stopped("a", 12.0))
    assert handle_all(machine, stopped("b", 12.0))[0] == launch(2, "a", "c", why=DRAIN_B)


# Nodes are drained.


@pytest.mark.parametrize("saved", [(), ("a",)])
def test_what_a_drained_node_holds_stays_if_the_world_breaks_before_all_have_saved(saved):
    """The next world may need it, as where a host is lost whose parts of the last commit the drained node has."""
    machine = saving_machine("a", "b", "c")
    handle_all(machine, *(checkpointed(node, 11.0) for node in saved))
    handle_all(machine, lost("c", 12.0), stopped("a", 13.0))
    actions = handle_all(machine, stopped("b", 13.0))
    assert actions[:2] == [launch(2, "a", why=actions[0].why), release_drained("b", frees_memory=False)]


def test_what_a_drained_node_holds_is_not_needed_if_a_node_is_lost_after_all_have_saved():
    machine = saving_machine("a", "b", "c")
    handle_all(machine, *(checkpointed(node, 11.0) for node in "abc"))
    handle_all(machine, lost("c", 12.0), stopped("a", 13.0))
    assert release_drained("b") in handle_all(machine, stopped("b", 13.0))


@pytest.mark.parametrize("place", range(7))
def test_what_a_node_holds_stays_if_it_is_drained_at_any_time_after_all_were_asked_to_save(place):
    """Its workers may have saved before they could know that this is copied."""
    machine = running_machine("a", "b", "c", nnodes="1:3")
    saved = [checkpointed(node, 11.0) for node in "abc"]
    events = [restart_requested(10.0), *saved, *(stopped(node, 12.0) for node in "abc")]
    events.insert(place, draining("c", 9.0))
    assert release_drained("c", frees_memory=place == 0) in handle_all(machine, *events)


def test_what_the_only_node_holds_stays_if_there_is_none_to_copy_it_to():
    machine = running_machine("a")
    handle_all(machine, draining("a", 10.0, deadline=40.0), tick(25.0), checkpointed("a", 26.0))
    assert release_drained("a", frees_memory=False) in handle_all(machine, stopped("a", 27.0))


def test_several_drains_cause_one_resize():
    """Nodes that are drained while the workers save cause no further resize, and are left out as well."""
    machine = saving_machine("a", "b", "c", "d")
    assert handle_all(machine, draining("c", 10.5), draining("d", 12.0), draining("b", 13.0)) == []
    handle_all(machine, *(checkpointed(node, 14.0) for node in "abcd"), *(stopped(node, 15.0) for node in "abc"))
    assert handle_all(machine, stopped("d", 15.0)) == [
        launch(2, "a", why=DRAIN_B),
        release_drained("b"),
        release_drained("c", frees_memory=False),
        release_drained("d", frees_memory=False),
        start_timer(135.0),
    ]


def test_all_nodes_of_a_drained_host_are_drained():
    """a and b share a host: if it is drained, too few nodes are left, and the workers continue."""
    machine = gathering_machine(job("3:4"))
    handle_all(machine, *(joined(node, host="x" if node in "ab" else "") for node in "abcd"))
    start_all_workers(machine, 1.0)
    handle_all(machine, draining("a", 5.0), draining("b", 5.0))
    assert machine.phase is Phase.RUNNING
    assert handle_all(machine, joined("e", 6.0))[0] == request_checkpoint(1, "a", "b", "c", "d", why="e joined")


def test_earlier_drain_deadline_shortens_saving():
    """Half of the time until the earliest deadline, less a second, is for saving."""
    machine = saving_machine("a", "b", "c")
    assert handle_all(machine, draining("c", 12.0, deadline=19.0)) == [saving_timer(15.0)]
    assert handle_all(machine, tick(15.0)) == [
        report_unsaved("a", "b", "c"),
        stop(1, "a", "b", "c", grace=3.0, why=DRAIN_B),
        stopping_timer(138.0),
    ]


def test_later_drain_deadline_does_not_extend_saving():
    """The earliest deadline of all drained nodes counts."""
    machine = running_machine("a", "b", "c", nnodes="1:3")
    handle_all(machine, draining("b", 10.0, deadline=19.0))
    assert handle_all(machine, draining("c", 11.0)) == []
    assert handle_all(machine, tick(14.0))[1] == stop(1, "a", "b", "c", grace=4.0, why=DRAIN_B)


def test_drain_with_little_time():
    """Half of the time is for saving; the grace is what is left of it, less a second."""
    machine = running_machine("a", "b", nnodes="1:2")
    assert handle_all(machine, draining("b", 5.0, deadline=16.0)) == [
        request_checkpoint(1, "a", "b", why=DRAIN_B),
        saving_timer(10.0),
    ]
    assert handle_all(machine, tick(10.0)) == [
        report_unsaved("a", "b"),
        stop(1, "a", "b", grace=5.0, why=DRAIN_B),
        stopping_timer(135.0),
    ]


def test_drain_with_no_time():
    """The workers are stopped at once and without grace."""
    machine = running_machine("a", "b", nnodes="1:2")
    assert handle_all(machine, draining("b", 5.0, deadline=2.0)) == [
        request_checkpoint(1, "a", "b", why=DRAIN_B),
        saving_timer(5.0),
    ]
    assert handle_all(machine, tick(5.0))[1] == stop(1, "a", "b", grace=0.0, why=DRAIN_B)


@pytest.mark.parametrize("deadline", [1.0, 60.0])
def test_drain_while_workers_start(deadline):
    """The next attempt leaves the node out. Before, what only this node holds is restored and saved."""
    machine = gathering_machine(job("1:2"))
    handle_all(machine, joined("a"), joined("b"), started("b", 1.0))
    assert handle_all(machine, draining("b", 2.0, deadline=deadline)) == []
    handle_all(machine, started("a", 3.0))
    assert handle_all(machine, tick(3.0))[0] == request_checkpoint(
        1, "a", "b", why="the time of a drained node is short"
    )


def test_drain_while_stopping():
    """The stop continues, and the next attempt leaves the node out."""
    machine = saving_machine("a", "b", "c")
    handle_all(machine, checkpointed("a", 11.0, step=None))
    assert handle_all(machine, draining("c", 12.0)) == []
    handle_all(machine, stopped("a", 13.0), stopped("b", 13.0))
    assert handle_all(machine, stopped("c", 13.0))[0] == launch(2, "a", why=DRAIN_B)


def test_drained_node_outside_the_attempt_is_released():
    """No worker depends on the node, so it is released at once."""
    machine = running_machine("a", nnodes="1:3")
    handle_all(machine, joined("b", 10.0))
    assert handle_all(machine, draining("b", 11.0)) == [release_drained("b", frees_memory=False)]
    assert handle_all(machine, tick(15.0)) == []
    assert machine.phase is Phase.RUNNING


def test_drained_spare_does_not_affect_other_drained_nodes():
    """Releasing a drained spare keeps the drained node that is part of the attempt."""
    machine = running_machine("a", "b", multiple_of=4, spares=1)
    handle_all(machine, joined("c", 5.0, nproc=1), draining("b", 10.0, deadline=200.0))
    assert handle_all(machine, draining("c", 11.0)) == [release_drained("c", frees_memory=False)]
    assert (machine.phase, set(machine.nodes)) == (Phase.RUNNING, {"a", "b"})


def test_drained_node_that_has_finished():
    """The node's workers are done, so the others continue to the end."""
    machine = running_machine("a", "b", nnodes="1:2")
    assert handle_all(machine, finished("a", 5.0), draining("a", 6.0)) == []
    assert handle_all(machine, finished("b", 7.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


# Nodes are drained, and too few are left.


def drained_below_min(deadline: float = 200.0, **settings: object) -> Machine:
    """Return a machine that runs on a and b, both needed, of which b is being drained."""
    machine = running_machine("a", "b", **settings)
    handle_all(machine, draining("b", 10.0, deadline=deadline))
    assert machine.phase is Phase.RUNNING
    return machine


def test_needed_drained_node_keeps_running():
    """The workers continue until the latest time to save, which is two graces before the deadline."""
    machine = running_machine("a", "b")
    status = f"{DRAIN_B}; the workers go on until another node comes, or the time is short"
    assert handle_all(machine, draining("b", 10.0, deadline=200.0)) == [SetTimer(at=130.0, why=status)]
    assert (machine.phase, machine.status) == (Phase.RUNNING, status)


def test_the_last_node_is_drained_with_little_notice():
    """Its workers train on for half of the notice, though all of it is less than two graces; then they save."""
    machine = running_machine("a")
    handle_all(machine, draining("a", 10.0, deadline=40.0))
    assert machine.phase is Phase.RUNNING
    assert machine.state.resize.evacuate_at == 25.0
    why = "the time of a drained node is short"
    assert handle_all(machine, tick(25.0)) == [request_checkpoint(1, "a", why=why), saving_timer(32.0)]


@given(
    notices=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 300)), min_size=1, max_size=6),
    shutdown_timeout=st.floats(0, 600),
)
def test_a_drained_world_trains_on_and_has_time_to_save(notices, shutdown_timeout):
    """However many notices come, it saves half a notice before its deadline at the latest, and not before that."""
    machine = running_machine("a", shutdown_timeout=shutdown_timeout)
    at, latest = 10.0, []
    for pause, notice in notices:
        at += pause
        if machine.phase is not Phase.RUNNING:
            break
        handle_all(machine, draining("a", at, deadline=at + notice))
        latest.append(at + notice - min(notice / 2, 2 * shutdown_timeout + 10.0))
        if machine.phase is Phase.RUNNING:
            assert machine.state.resize.evacuate_at <= min(latest) + 1e-6
            deadline = machine.world.deadline
            assert deadline.at - machine.state.resize.evacuate_at <= max(notice for _, notice in notices) + 1e-6


def test_replacement_of_a_drained_node_joins():
    """The resize begins at once, without a last call."""
    machine = drained_below_min()
    assert handle_all(machine, joined("c", 60.0)) == [
        request_checkpoint(1, "a", "b", why="c joined"),
        saving_timer(169.0),
    ]
    handle_all(machine, checkpointed("a", 61.0), checkpointed("b", 61.0), stopped("a", 62.0))
    assert handle_all(machine, stopped("b", 62.0)) == [
        launch(2, "a", "c", why="c joined"),
        release_drained("b"),
        start_timer(182.0),
    ]
    assert machine.state.resize.evacuate_at is None


def test_replacement_below_max_begins_the_resize():
    """MIN nodes without the drained one are enough to begin the resize."""
    machine = drained_below_min(nnodes="2:4")
    assert handle_all(machine, joined("c", 60.0))[0] == request_checkpoint(1, "a", "b", why="c joined")


def test_no_replacement_of_a_drained_node_joins():
    """The workers save, the drained node is released, and the machine gathers."""
    machine = drained_below_min(join_timeout=100.0)
    why = "the time of a drained node is short"
    assert handle_all(machine, tick(130.0)) == [request_checkpoint(1, "a", "b", why=why), saving_timer(169.0)]
    assert handle_all(machine, tick(169.0)) == [
        report_unsaved("a", "b"),
        stop(1, "a", "b", grace=30.0, why=why),
        stopping_timer(319.0),
    ]
    handle_all(machine, stopped("a", 170.0))
    released = release_drained("b", frees_memory=False)
    assert handle_all(machine, stopped("b", 171.0)) == [released, SetTimer(at=271.0, why="1 of 2 nodes")]
    assert handle_all(machine, lost("b", 172.0)) == []
    assert handle_all(machine, joined("c", 173.0))[0] == launch(2, "a", "c", why="2 of 2 nodes; c joined")


def test_excluded_host_may_replace_a_drained_node():
    """There are too few nodes otherwise, so the exclusion ends early."""
    machine = running_machine("a", "b", "c", nnodes="2:3", max_restarts=9, exclude_after=1)
    handle_all(machine, failed("c", 20.0))
    start_all_workers(machine, 20.0)
    handle_all(machine, draining("b", 21.0, deadline=300.0))
    assert handle_all(machine, tick(36.0))[0] == uncordon("c")


def test_resize_waits_for_all_missing_nodes():
    """Two replacements are needed: the resize begins when the second node joins."""
    machine = running_machine("a", "b", "c")
    handle_all(machine, draining("b", 10.0), draining("c", 10.0))
    assert handle_all(machine, joined("d", 20.0)) == []
    assert handle_all(machine, joined("e", 21.0))[0] == request_checkpoint(1, "a", "b", "c", why="e joined")


def test_earliest_drain_deadline_counts():
    """It does not matter which node's drain was reported first."""
    machine = drained_below_min(deadline=500.0)
    handle_all(machine, draining("a", 11.0, deadline=200.0))
    assert machine.state.resize.evacuate_at == 130.0
    machine = drained_below_min(deadline=200.0)
    handle_all(machine, draining("a", 11.0, deadline=500.0))
    assert machine.state.resize.evacuate_at == 130.0


def test_drained_node_is_lost_before_its_deadline():
    """The attempt ends as after any loss, and the machine gathers."""
    machine = drained_below_min()
    why = "b was lost: its agent died"
    assert handle_all(machine, lost("b", 20.0)) == [stop(1, "a", grace=0.0, why=why), stopping_timer(140.0)]
    assert handle_all(machine, stopped("a", 21.0)) == [SetTimer(at=621.0, why="1 of 2 nodes")]


@pytest.mark.parametrize("signal", [-9, -15])
def test_kill_on_a_drained_node_spends_no_restart(signal):
    """A kill from outside on a drained node costs no restart and does not end the run."""
    machine = drained_below_min()
    why = f"rank 1 on b was killed by {'SIGKILL' if signal == -9 else 'SIGTERM'}; b is being drained"
    assert handle_all(machine, failed("b", 20.0, exit_code=signal)) == [
        stop(1, "a", "b", grace=0.0, why=why),
        stopping_timer(140.0),
    ]
    assert handle_all(machine, stopped("a", 21.0), stopped("b", 21.0))[-1] == SetTimer(at=621.0, why="1 of 2 nodes")


def test_collateral_failure_beside_a_drained_node_spends_no_restart():
    """A broken connection is blamed on the drained node, which may be released before it is lost."""
    machine = drained_below_min()
    handle_all(machine, failed("a", 20.0, **raised("RuntimeError", "Connection reset by peer")))
    assert (machine.restarts, machine.phase) == (0, Phase.STOPPING)
    assert machine.status.endswith("; b is being drained")


def test_script_error_on_a_drained_node_spends_a_restart():
    """Errors of the script count on drained nodes as on others."""
    machine = drained_below_min(max_restarts=1)
    handle_all(machine, failed("b", 20.0, **raised("ValueError", "NaN")))
    assert machine.restarts == 1


def test_needed_node_drained_while_workers_start():
    """The attempt continues to start, and is replaced when another node joins."""
    machine = gathering_machine(job(2))
    handle_all(machine, joined("a", 1.0), joined("b", 1.0), started("b", 1.1))
    assert handle_all(machine, draining("b", 2.0, deadline=200.0)) == []
    assert handle_all(machine, started("a", 3.0)) == [SetTimer(at=130.0, why="more nodes may come")]
    assert machine.phase is Phase.RUNNING
    assert handle_all(machine, joined("c", 4.0))[0] == request_checkpoint(1, "a", "b", why="c joined")


def test_replacement_joins_while_workers_start():
    """The workers save as soon as all are started."""
    machine = gathering_machine(job(2))
    handle_all(machine, joined("a", 1.0), joined("b", 1.0), draining("b", 2.0, deadline=200.0), joined("c", 3.0))
    assert handle_all(machine, started("a", 4.0), started("b", 4.0)) == [SetTimer(at=4.0, why="more nodes may come")]
    assert handle_all(machine, tick(4.0))[0] == request_checkpoint(1, "a", "b", why="nodes joined")


# Nodes join later.


def test_node_that_joins_while_running_causes_a_resize():
    """After a last call, all workers save and start again; the old nodes keep the first ranks."""
    machine = running_machine("b", "c", nnodes="1:5")
    now = machine.now
    assert handle_all(machine, joined("a", now + 10)) == [SetTimer(at=now + 15, why="a joined; more may come")]
    assert handle_all(machine, joined("d", now + 12)) == []
    assert handle_all(machine, tick(now + 15)) == [
        request_checkpoint(1, "b", "c", why="nodes joined"),
        saving_timer(now + 615),
    ]
    assert handle_all(machine, checkpointed("b", now + 16), checkpointed("c", now + 16)) == [
        stop(1, "b", "c", grace=30.0, why="nodes joined"),
        stopping_timer(now + 166),
    ]
    assert handle_all(machine, stopped("b", now + 16), stopped("c", now + 17)) == [
        launch(2, "b", "c", "a", "d", why="nodes joined"),
        start_timer(now + 137),
    ]
    assert machine.restarts == 0


def test_resize_is_immediate_at_max_nodes():
    """When MAX nodes have joined there is no last call."""
    machine = running_machine("b", "c", nnodes="1:4")
    now = machine.now
    handle_all(machine, joined("a", now + 10))
    assert handle_all(machine, joined("d", now + 11)) == [
        request_checkpoint(1, "b", "c", why="d joined"),
        saving_timer(now + 611),
    ]


def test_node_joins_while_others_start():
    """Its last call begins at once; the resize waits until the workers run and the last call is over."""
    machine = gathering_machine(job("1:3", start_timeout=60.0))
    handle_all(machine, joined("a", 1.0), tick(6.0))
    assert handle_all(machine, joined("b", 7.0)) == []
    assert handle_all(machine, started("a", 8.0)) == [SetTimer(at=12.0, why="more nodes may come")]
    assert handle_all(machine, tick(12.0)) == [request_checkpoint(1, "a", why="nodes joined"), saving_timer(612.0)]


def test_max_nodes_reached_while_others_start():
    """The workers save as soon as all are started."""
    machine = gathering_machine(job("1:2"))
    handle_all(machine, joined("a", 1.0), tick(6.0))
    assert handle_all(machine, joined("b", 7.0)) == []
    assert handle_all(machine, started("a", 8.0)) == [SetTimer(at=8.0, why="more nodes may come")]
    assert handle_all(machine, tick(8.0))[0] == request_checkpoint(1, "a", why="nodes joined")


def test_max_nodes_end_a_last_call_while_others_start():
    """A last call that began in STARTING ends when MAX nodes have joined."""
    machine = gathering_machine(job("1:3"))
    handle_all(machine, joined("a", 1.0), tick(6.0), joined("b", 7.0), joined("c", 8.0))
    assert handle_all(machine, started("a", 9.0)) == [SetTimer(at=9.0, why="more nodes may come")]


def test_node_that_joins_and_is_lost_causes_no_resize():
    """If the new node is lost before the last call is over, the workers continue."""
    machine = running_machine("a", nnodes="1:3")
    now = machine.now
    handle_all(machine, joined("b", now + 10), lost("b", now + 11))
    assert handle_all(machine, tick(now + 15)) == []
    assert machine.phase is Phase.RUNNING


def test_no_resize_after_a_node_finished():
    """A resize would make the workers of the finished node do their work again."""
    machine = running_machine("a", "b", nnodes="1:3")
    now = machine.now
    assert handle_all(machine, finished("a", now + 1), joined("c", now + 2), tick(now + 7)) == []
    assert handle_all(machine, finished("b", now + 8)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_resize_is_possible_again_in_the_next_attempt():
    """A node that finished in an earlier attempt does not prevent a resize."""
    machine = running_machine("a", "b", nnodes="1:3", max_restarts=1)
    handle_all(machine, finished("a", 5.0), failed("b", 6.0))
    start_all_workers(machine, 7.0)
    assert handle_all(machine, joined("c", 20.0))[0] == request_checkpoint(2, "a", "b", why="c joined")


def test_no_resize_if_a_node_finishes_during_the_last_call():
    """The last call ends without a resize."""
    machine = running_machine("a", "b", nnodes="1:4")
    now = machine.now
    handle_all(machine, joined("c", now + 1), finished("a", now + 2))
    assert handle_all(machine, tick(now + 6)) == []
    assert machine.phase is Phase.RUNNING


def test_remaining_nodes_keep_their_order():
    """Nodes of the last attempt keep their order; new nodes follow in natural order."""
    machine = running_machine("c", "d", "e", nnodes="2:6")
    handle_all(machine, joined("b", 10.0), joined("a", 10.0))
    handle_all(machine, lost("d", 11.0))
    assert machine.roster == ("c", "e", "a", "b")


# Spares.


def test_nodes_beyond_max_wait():
    """Nodes beyond MAX cause no resize, and are not used while the nodes of the attempt are there."""
    machine = running_machine("b", "c", max_restarts=1, spares=1)
    assert handle_all(machine, joined("a", 5.0)) == []
    handle_all(machine, failed("b", 6.0))
    assert (machine.attempt, machine.roster) == (2, ("b", "c"))


def test_spare_replaces_a_lost_node_at_once():
    """The next attempt is launched with the stop; the spare node comes after the remaining nodes."""
    machine = running_machine("b", "c", spares=1)
    handle_all(machine, joined("a", 5.0))
    why = "b was lost: its agent died"
    assert handle_all(machine, lost("b", 6.0)) == [
        stop(1, "c", grace=0.0, why=why),
        launch(2, "c", "a", why=why),
        start_timer(126.0),
    ]


def test_spare_replaces_a_drained_node():
    """With a spare node there are enough nodes, so the workers save at once."""
    machine = running_machine("b", "c", spares=1)
    handle_all(machine, joined("a", 5.0))
    assert handle_all(machine, draining("b", 6.0)) == [
        request_checkpoint(1, "b", "c", why=DRAIN_B),
        saving_timer(606.0),
    ]
    handle_all(machine, checkpointed("b", 7.0), checkpointed("c", 7.0), stopped("b", 8.0))
    assert handle_all(machine, stopped("c", 8.0))[0] == launch(2, "c", "a", why=DRAIN_B)


# World sizes that are a multiple of something.


def test_world_size_is_a_multiple():
    """Three nodes of two workers are six: with `multiple_of: 4` one node waits."""
    machine = gathering_machine(job("1:4", multiple_of=4))
    assert handle_all(machine, joined("a", 1.0)) == []
    assert machine.status == "1 node (1 to 4 requested), but no world size that is a multiple of 4"
    assert handle_all(machine, joined("b", 2.0)) == [SetTimer(at=7.0, why="2 nodes (1 to 4 requested)")]
    handle_all(machine, joined("c", 3.0))
    assert handle_all(machine, tick(7.0))[0] == launch(1, "a", "b", why="3 nodes (1 to 4 requested); last call is over")


def test_node_that_allows_no_larger_multiple_causes_no_resize():
    """The resize begins when another node makes the next multiple possible."""
    machine = running_machine("a", "b", nnodes="1:8", multiple_of=4)
    assert handle_all(machine, joined("c", 20.0)) == []
    assert handle_all(machine, joined("d", 21.0)) == [SetTimer(at=26.0, why="d joined; more may come")]
    assert handle_all(machine, tick(26.0))[0] == request_checkpoint(1, "a", "b", why="nodes joined")


def test_last_node_waits_if_the_rest_is_no_multiple():
    """After a loss, the last node is left out if the world size would not be a multiple."""
    machine = running_machine("a", "b", "c", "d", nnodes="1:4", multiple_of=4)
    assert handle_all(machine, lost("b", 20.0))[1] == launch(2, "a", "c", why="b was lost: its agent died")


def test_no_world_size_is_a_multiple():
    """The run gathers as with too few nodes; status and reason name the multiple."""
    machine = running_machine("a", "b", nnodes="1:2", multiple_of=4, join_timeout=100.0)
    handle_all(machine, lost("b", 20.0))
    why = "1 node (1 to 2 requested), but no world size that is a multiple of 4"
    assert handle_all(machine, stopped("a", 21.0)) == [SetTimer(at=121.0, why=why)]
    end = "1 of 1 nodes, and no world size that is a multiple of 4, after 100 s"
    assert handle_all(machine, tick(121.0)) == [Finish(exit_code=3, why=end)]


def test_unequal_nodes_make_the_largest_world():
    """Of nodes with 4, 2 and 3 workers, the one with 3 is left out: 6 is the largest even world size."""
    machine = gathering_machine(job("1:3", multiple_of=2))
    handle_all(machine, joined("a", 1.0, nproc=4), joined("c", 1.0, nproc=3))
    assert handle_all(machine, joined("b", 1.0, nproc=2))[0] == launch(
        1, "a", "b", why="3 nodes (1 to 3 requested); b joined"
    )
    assert machine.world.size == 6


def test_remaining_nodes_without_a_multiple_are_replaced():
    """If the remaining node allows no multiple, an attempt on other nodes is launched."""
    machine = gathering_machine(job(2, multiple_of=4))
    handle_all(machine, joined("c", 1.0, nproc=3), joined("d", 1.0, nproc=1))
    start_all_workers(machine, 2.0)
    handle_all(machine, joined("a", 3.0), joined("b", 3.0))
    assert handle_all(machine, lost("d", 4.0))[1] == launch(2, "a", "b", why="d was lost: its agent died")


def test_signals_are_forwarded_after_a_resize():
    """Signals go to the workers of the next attempt."""
    machine = saving_machine("a", "b")
    handle_all(machine, checkpointed("a", 11.0), checkpointed("b", 11.0), stopped("a", 12.0), stopped("b", 12.0))
    start_all_workers(machine, 13.0)
    assert handle_all(machine, forward_requested("SIGUSR1", 14.0)) == [
        ForwardSignal(attempt=2, nodes=("a",), signal="SIGUSR1", why="SIGUSR1 received")
    ]
