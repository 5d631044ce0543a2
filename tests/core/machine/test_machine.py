"""The decisions of the machine for one event after the other: which actions follow from each event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_helpers import (
    checkpointed,
    draining,
    exited,
    failed,
    failure,
    finished,
    forward_requested,
    gathering_machine,
    granted,
    handle_all,
    hung,
    job,
    joined,
    launch,
    lost,
    progressed,
    raised,
    running_machine,
    start_all_workers,
    start_timer,
    started,
    stop,
    stop_requested,
    stopped,
    stopping_timer,
    tick,
)

from raylaunch.core.machine.events_and_actions import Finish, ForwardSignal, Release, SetTimer
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase

KILLED = "rank 1 on a was killed by SIGKILL"


def sigusr(number: int, attempt: int, *nodes: str) -> ForwardSignal:
    """Return the action that forwards SIGUSR1 or SIGUSR2."""
    signal = f"SIGUSR{number}"
    return ForwardSignal(attempt=attempt, nodes=nodes, signal=signal, why=f"{signal} received")


def half_a_second_later(machine: Machine) -> float:
    return machine.now + 0.5


# Gathering.


def test_start_sets_the_placement_timer():
    """Before any event, the machine only sets the timer for `placement_timeout`."""
    assert Machine(job()).start() == [SetTimer(at=300.0, why="the cluster must give the nodes by then")]


def test_fixed_size_job_starts_when_all_nodes_joined():
    """A job of two nodes starts when the second node joins, and not before."""
    machine = gathering_machine(job(2))
    assert handle_all(machine, joined("a", 1.0)) == []
    assert machine.status == "1 of 2 nodes"
    assert handle_all(machine, joined("b", 2.0)) == [
        launch(1, "a", "b", why="2 of 2 nodes; b joined"),
        start_timer(122.0),
    ]
    assert machine.status == "starting 4 workers on 2 nodes"


def test_granted_node_is_not_counted_before_it_joins():
    """A granted node counts only after it has joined."""
    machine = gathering_machine(job(1))
    assert handle_all(machine, granted("a", 1.0)) == []
    assert (machine.phase, len(machine.nodes)) == (Phase.GATHERING, 0)


def test_elastic_job_waits_for_the_last_call():
    """MIN nodes begin the last call; when it is over, all nodes that joined take part."""
    machine = gathering_machine(job("2:4"))
    assert handle_all(machine, joined("a", 1.0)) == []
    assert handle_all(machine, joined("b", 2.0)) == [SetTimer(at=7.0, why="2 nodes (2 to 4 requested)")]
    assert handle_all(machine, joined("c", 3.0)) == []
    assert handle_all(machine, tick(7.0)) == [
        launch(1, "a", "b", "c", why="3 nodes (2 to 4 requested); last call is over"),
        start_timer(127.0),
    ]


def test_last_call_ends_when_max_nodes_joined():
    """The last call ends early when MAX nodes have joined."""
    machine = gathering_machine(job("1:2"))
    assert handle_all(machine, joined("a", 1.0), joined("b", 2.0)) == [
        SetTimer(at=6.0, why="1 node (1 to 2 requested)"),
        launch(1, "a", "b", why="2 nodes (1 to 2 requested); b joined"),
        start_timer(122.0),
    ]


@pytest.mark.parametrize(("gone", "ordered"), [(lost, []), (draining, [Release(node="b", why="it is being drained")])])
def test_last_call_is_cancelled_below_min_nodes(gone, ordered):
    """If a node leaves during the last call and fewer than MIN are left, the last call is cancelled."""
    machine = gathering_machine(job("2:4"))
    handle_all(machine, joined("a", 1.0), joined("b", 2.0))
    assert handle_all(machine, gone("b", 3.0)) == [*ordered, SetTimer(at=300.0, why="1 node (2 to 4 requested)")]
    assert handle_all(machine, tick(7.0)) == [SetTimer(at=300.0, why="1 node (2 to 4 requested)")]
    assert machine.phase is Phase.GATHERING


def test_last_call_continues_with_min_nodes():
    """One of three nodes may leave during the last call of a job that needs two."""
    machine = gathering_machine(job("2:4"))
    handle_all(machine, joined("a", 1.0), joined("b", 2.0), joined("c", 2.0))
    assert handle_all(machine, lost("b", 3.0)) == []
    assert handle_all(machine, tick(7.0)) == [
        launch(1, "a", "c", why="2 nodes (2 to 4 requested); last call is over"),
        start_timer(127.0),
    ]


def test_too_few_nodes_at_placement_timeout_exits_3():
    """With fewer than MIN nodes at `placement_timeout` the run ends with exit code 3."""
    machine = gathering_machine(job(2, placement_timeout=60.0))
    handle_all(machine, joined("a", 1.0))
    assert handle_all(machine, tick(60.0)) == [Finish(exit_code=3, why="1 of 2 nodes after 60 s")]
    assert machine.phase is Phase.DONE


def test_placement_timeout_during_last_call_starts_the_job():
    """If `placement_timeout` ends before the last call, the job starts with the nodes that joined."""
    machine = gathering_machine(job("1:4", placement_timeout=10.0, last_call=60.0))
    assert handle_all(machine, joined("a", 1.0)) == []
    assert handle_all(machine, tick(10.0)) == [
        launch(1, "a", why="1 node (1 to 4 requested); no more time to wait"),
        start_timer(130.0),
    ]


def test_early_tick_sets_the_timer_again():
    """A tick before the deadline only sets the timer for the deadline again."""
    machine = gathering_machine(job())
    assert handle_all(machine, tick(1.0)) == [SetTimer(at=300.0, why="0 of 2 nodes")]


def test_timer_is_never_set_in_the_past():
    """If a deadline has passed already, the timer is set to the present time."""
    machine = gathering_machine(job("2:4", placement_timeout=5.0, last_call=2.0))
    handle_all(machine, joined("a", 1.0), joined("b", 1.0))
    assert handle_all(machine, lost("b", 9.0)) == [SetTimer(at=9.0, why="1 node (2 to 4 requested)")]


# Starting and running.


def test_attempt_runs_when_all_nodes_started():
    """The attempt runs when the last node has started its workers; then there is no deadline."""
    machine = gathering_machine(job(2))
    handle_all(machine, joined("a"), joined("b"), started("b"))
    assert machine.phase is Phase.STARTING
    assert handle_all(machine, started("a", 1.0)) == []
    assert (machine.phase, machine.status) == (Phase.RUNNING, "4 workers on 2 nodes")
    assert handle_all(machine, tick(120.0)) == []


def test_run_ends_when_all_nodes_finished():
    """The run ends with exit code 0 when the last node's workers have finished."""
    machine = running_machine("a", "b")
    assert handle_all(machine, finished("b", 5.0)) == []
    assert handle_all(machine, finished("a", 6.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_workers_may_finish_before_others_started():
    """The workers of a node may finish before those of another node are started."""
    machine = gathering_machine(job(2))
    handle_all(machine, joined("a"), joined("b"), started("a"), finished("a"))
    assert handle_all(machine, started("b"), finished("b")) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_failure_stops_and_launches_at_once():
    """After a failure, a stop without grace and the next launch follow together."""
    machine = running_machine("a", "b", max_restarts=3)
    why = f"{KILLED}; restart 1 of 3"
    assert handle_all(machine, failed("a", 5.0)) == [
        stop(1, "a", "b", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_timer(125.0),
    ]


def test_failure_while_starting_spends_a_restart():
    """A failure in STARTING spends a restart like a failure in RUNNING."""
    machine = gathering_machine(job(2, max_restarts=1))
    handle_all(machine, joined("a"), joined("b"), started("a"))
    assert [type(action).__name__ for action in handle_all(machine, failed("a", 1.0))] == ["Stop", "Launch", "SetTimer"]
    assert machine.restarts == 1


def test_unrequested_stop_of_workers_is_a_failure():
    """Workers that a node stopped by itself count as failed, as long as the machine has not ordered a stop."""
    machine = running_machine("a", max_restarts=1)
    assert handle_all(machine, failed("a", 5.0, stopped=True))[1] == launch(2, "a", why=f"{KILLED}; restart 1 of 1")


def test_restart_takes_in_nodes_of_the_last_call():
    """Nodes that wait for the end of the last call take part in an attempt that starts before it."""
    machine = running_machine("a", nnodes="1:3", max_restarts=1)
    handle_all(machine, joined("b", 10.0))
    why = f"{KILLED}; restart 1 of 1"
    assert handle_all(machine, failed("a", 11.0)) == [
        stop(1, "a", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_timer(131.0),
    ]
    assert handle_all(machine, tick(15.0)) == [SetTimer(at=131.0, why="the time has not come")]


# The end of a run that fails.


def test_first_failure_ends_a_run_without_restarts():
    """Without restarts, the first failure ends the run with grace and exit code 1."""
    machine = running_machine("a", "b")
    why = f"{KILLED}; no restarts were allowed"
    assert handle_all(machine, failed("a", 5.0)) == [stop(1, "a", "b", grace=30.0, why=why), stopping_timer(155.0)]
    assert handle_all(machine, stopped("a", 6.0)) == []
    assert handle_all(machine, stopped("b", 7.0)) == [Finish(exit_code=1, why=why)]


def test_run_ends_when_the_budget_is_spent():
    """The failure after `max_restarts` restarts ends the run with exit code 1."""
    machine = running_machine("a", max_restarts=2)
    for attempt in (1, 2):
        handle_all(machine, failed("a", half_a_second_later(machine), attempt=attempt))
        start_all_workers(machine, half_a_second_later(machine))
    why = f"{KILLED}; all 2 restarts are used"
    assert handle_all(machine, failed("a", 5.0, attempt=3)) == [
        stop(3, "a", grace=30.0, why=why),
        stopping_timer(155.0),
    ]
    assert handle_all(machine, stopped("a", 6.0, attempt=3)) == [Finish(exit_code=1, why=why)]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            raised("ImportError", "no torchvision"),
            "raised ImportError: no torchvision; a restart cannot mend ImportError",
        ),
        (raised("SyntaxError", "bad input"), "raised SyntaxError: bad input; a restart cannot mend SyntaxError"),
        (
            raised("FileNotFoundError", "no script /job/train.py", hopeless=True),
            "could not begin: no script /job/train.py; a restart cannot mend that",
        ),
    ],
)
def test_permanent_errors_are_not_retried(facts, why):
    """A script that does not exist, or cannot be imported, is not restarted."""
    machine = running_machine("a", max_restarts=10)
    why = f"rank 1 on a {why}"
    assert handle_all(machine, failed("a", 5.0, **facts)) == [stop(1, "a", grace=30.0, why=why), stopping_timer(155.0)]
    assert handle_all(machine, stopped("a", 6.0)) == [Finish(exit_code=93, why=why)]


@pytest.mark.parametrize("progress", [{"saved": 7}, {"committed": 8}])
def test_restarts_that_bring_no_saved_step_end_the_run(progress):
    """A step counts as saved if the script reports that, or has committed it by `State`."""
    machine = running_machine("a", max_restarts=100, exclude_after=0)
    handle_all(machine, replace(progressed(2.0), **progress))
    for attempt in range(1, 5):
        assert machine.phase is Phase.RUNNING
        handle_all(machine, failed("a", 100.0 * attempt, attempt=attempt, **raised("ValueError", line=attempt)))
        handle_all(machine, started("a", 100.0 * attempt, attempt=attempt + 1))
    assert machine.phase is Phase.STOPPING
    assert machine.status.endswith("; 3 restarts have brought no saved step after step 7")


def test_steps_that_no_heartbeat_told_of_count_as_saved():
    """The worker that failed tells of the last one: it has died before the next heartbeat."""
    machine = running_machine("a", max_restarts=100, exclude_after=0)
    handle_all(machine, replace(progressed(2.0), saved=7))
    for attempt in range(1, 20):
        facts = raised("ValueError", line=attempt)
        handle_all(machine, failed("a", 100.0 * attempt, attempt=attempt, saved=7 + attempt, **facts))
        handle_all(machine, started("a", 100.0 * attempt, attempt=attempt + 1))
    assert machine.phase is Phase.RUNNING


def fail_three_times(machine: Machine, *, every: float, **facts: object) -> None:
    """Let the first three attempts fail, each after `every` seconds."""
    for attempt in (1, 2, 3):
        handle_all(machine, failed("a", machine.now + every, attempt=attempt, **facts))
        start_all_workers(machine, machine.now)


def test_same_failure_three_times_within_a_minute_ends_the_run():
    """The third failure at the same place within 60 s ends the run, whatever is left of the budget."""
    machine = running_machine("a", max_restarts=10)
    fail_three_times(machine, every=20.0, **raised("ValueError", "NaN"))
    assert machine.phase is Phase.STOPPING
    assert machine.status == "rank 1 on a raised ValueError: NaN; the same failure 3 times within 60 s"


def test_same_failure_once_an_hour_only_spends_restarts():
    """Equal failures with an hour between them only spend restarts."""
    machine = running_machine("a", max_restarts=10, exclude_after=0)
    fail_three_times(machine, every=3600.0, **raised("ValueError", "NaN"))
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 4)


def test_kills_are_never_the_same_failure():
    """Kills from outside do not count as equal failures: they do not depend on the script."""
    machine = running_machine("a", max_restarts=10, exclude_after=0)
    fail_three_times(machine, every=1.0)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 4)


def test_only_consecutive_equal_failures_count():
    """Three equal failures with another one between them do not end the run."""
    machine = running_machine("a", max_restarts=10, exclude_after=0)
    for attempt, facts in enumerate((raised("ValueError"), {}, raised("ValueError"), raised("ValueError")), start=1):
        handle_all(machine, failed("a", machine.now + 1.0, attempt=attempt, **facts))
        start_all_workers(machine, machine.now)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 5)


def test_reports_of_an_ended_attempt_are_ignored():
    """In GATHERING, reports of the last attempt change nothing."""
    machine = running_machine("a", "b", max_restarts=3)
    handle_all(machine, finished("a", 5.0), lost("b", 6.0), stopped("a", 7.0))
    assert machine.phase is Phase.GATHERING
    assert handle_all(machine, finished("a", 8.0), failed("a", 8.0), started("a", 8.0), stopped("a", 8.0)) == []
    assert (machine.phase, machine.restarts) == (Phase.GATHERING, 0)


def test_node_that_finished_counts_as_started():
    """The machine does not wait for `WorkersStarted` of a node whose workers have finished."""
    machine = gathering_machine(job("1:2"))
    handle_all(machine, joined("a", 1.0), joined("b", 1.0), started("a", 2.0))
    handle_all(machine, finished("b", 3.0))
    assert machine.phase is Phase.RUNNING
    assert handle_all(machine, finished("a", 4.0))[-1] == Finish(exit_code=0, why="all 4 workers finished")


def test_reason_of_one_finished_worker():
    """With one worker the reason is in the singular."""
    machine = gathering_machine(job(1))
    handle_all(machine, joined("a", 1.0, nproc=1), started("a", 2.0))
    assert handle_all(machine, finished("a", 3.0)) == [Finish(exit_code=0, why="the worker finished")]


def test_failures_while_stopping_are_only_recorded():
    """Failures in STOPPING spend no restart, but are added to the failures of the attempt."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=3)
    handle_all(machine, draining("a", 5.0), checkpointed("a", 5.5, step=None))
    assert handle_all(machine, failed("b", 6.0), finished("a", 6.0)) == []
    assert (machine.restarts, len(machine.world.failures)) == (0, 1)


# Nodes are lost.


def test_lost_node_is_replaced_by_a_waiting_node():
    """If enough nodes are left, the next attempt starts at once and spends no restart."""
    machine = running_machine("a", "b", nnodes="2:2")
    handle_all(machine, joined("c", 2.0))
    why = "a was lost: its agent died"
    assert handle_all(machine, lost("a", 5.0)) == [
        stop(1, "b", grace=0.0, why=why),
        launch(2, "b", "c", why=why),
        start_timer(125.0),
    ]
    assert machine.restarts == 0


def test_elastic_job_continues_without_a_lost_node():
    """With MIN nodes or more, the next attempt starts at once on the other nodes."""
    machine = running_machine("a", "b", "c", nnodes="2:3")
    assert handle_all(machine, lost("b", 9.0))[1] == launch(2, "a", "c", why="b was lost: its agent died")


def test_below_min_nodes_the_run_gathers():
    """With too few nodes the others are stopped; after `join_timeout` the run ends with exit code 3."""
    machine = running_machine("a", "b", join_timeout=100.0)
    assert handle_all(machine, lost("a", 5.0)) == [
        stop(1, "b", grace=0.0, why="a was lost: its agent died"),
        stopping_timer(125.0),
    ]
    assert machine.phase is Phase.STOPPING
    assert handle_all(machine, stopped("b", 6.0)) == [SetTimer(at=106.0, why="1 of 2 nodes")]
    assert machine.phase is Phase.GATHERING
    assert handle_all(machine, tick(106.0)) == [Finish(exit_code=3, why="1 of 2 nodes after 100 s")]


def test_replacement_node_starts_the_next_attempt():
    """A node that joins in GATHERING starts the next attempt; the remaining nodes keep the first ranks."""
    machine = running_machine("a", "b")
    handle_all(machine, lost("a", 5.0), stopped("b", 6.0))
    assert handle_all(machine, joined("A", 50.0)) == [
        launch(2, "b", "A", why="2 of 2 nodes; A joined"),
        start_timer(170.0),
    ]


def test_loss_of_the_only_node():
    """With no node left to stop, the machine still ends the attempt (`Stop` without nodes) and gathers."""
    machine = running_machine("a")
    assert handle_all(machine, lost("a", 5.0)) == [
        stop(1, grace=0.0, why="a was lost: its agent died"),
        SetTimer(at=605.0, why="0 of 1 nodes"),
    ]
    assert machine.phase is Phase.GATHERING


def test_node_lost_while_stopping_is_not_awaited():
    """A node that is lost in STOPPING is not awaited any more."""
    machine = running_machine("a", "b", "c")
    handle_all(machine, lost("a", 5.0), stopped("b", 6.0))
    assert handle_all(machine, lost("c", 7.0)) == [SetTimer(at=607.0, why="1 of 3 nodes")]


def test_loss_while_gathering_cancels_the_last_call():
    """The loss of a node of the last attempt cancels the last call if too few nodes are left."""
    machine = running_machine("a", "b", nnodes="2:4")
    handle_all(machine, lost("b", 10.0), stopped("a", 11.0), joined("c", 12.0))
    assert machine.state.last_call == 17.0
    assert handle_all(machine, lost("a", 13.0)) == [SetTimer(at=611.0, why="1 node (2 to 4 requested)")]
    assert handle_all(machine, tick(17.0)) == [SetTimer(at=611.0, why="1 node (2 to 4 requested)")]


def test_loss_of_a_spare_node_changes_nothing():
    """The loss of a node without workers of the attempt has no consequences."""
    machine = running_machine("a")
    assert handle_all(machine, joined("b", 2.0), lost("b", 3.0), tick(9.0)) == []


def test_loss_of_a_finished_node_changes_nothing():
    """The other nodes continue, and the workers of the lost node count as finished."""
    machine = running_machine("a", "b")
    assert handle_all(machine, finished("a", 5.0), lost("a", 6.0)) == []
    assert handle_all(machine, finished("b", 7.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_loss_of_the_last_awaited_node_ends_the_stop():
    """If the only awaited node is lost in STOPPING, the next transition follows at once."""
    machine = running_machine("a", "b")
    why = f"{KILLED.replace('on a', 'on b')}; no restarts were allowed"
    handle_all(machine, finished("a", 5.0), failed("b", 6.0), stopped("b", 7.0))
    assert handle_all(machine, lost("a", 8.0)) == [Finish(exit_code=1, why=why)]


def test_loss_after_another_node_finished_ends_the_attempt():
    """The loss of an unfinished node ends the attempt, even if another node has finished."""
    machine = running_machine("a", "b")
    handle_all(machine, finished("a", 5.0))
    assert handle_all(machine, lost("b", 6.0))[0] == stop(1, "a", grace=0.0, why="b was lost: its agent died")


# Nodes that do not answer.


def test_node_that_does_not_start_is_released():
    """After `start_timeout` the node is released; with enough others the next attempt starts at once."""
    machine = gathering_machine(job("2:3", start_timeout=60.0))
    handle_all(machine, joined("a"), joined("b"), joined("c"), started("a", 1.0), started("c", 1.0))
    why = "b did not start its workers in time"
    assert handle_all(machine, tick(60.0)) == [
        Release(node="b", why="did not start its workers in time"),
        stop(1, "a", "c", grace=0.0, why=why),
        launch(2, "a", "c", why=why),
        start_timer(120.0),
    ]


def test_too_few_nodes_start_in_time():
    """If fewer than MIN nodes start in time, these are stopped and the machine gathers."""
    machine = gathering_machine(job(2, start_timeout=60.0))
    handle_all(machine, joined("a"), joined("b"), started("a", 1.0))
    assert handle_all(machine, tick(60.0)) == [
        Release(node="b", why="did not start its workers in time"),
        stop(1, "a", grace=0.0, why="b did not start its workers in time"),
        stopping_timer(120.0),
    ]


def test_node_that_does_not_stop_is_released():
    """A node that has not stopped 10 s after the end of the grace is released, and the run goes on."""
    machine = running_machine("a", "b", shutdown_timeout=5.0)
    handle_all(machine, stop_requested("SIGINT", 10.0), stopped("a", 11.0))
    assert handle_all(machine, tick(25.0)) == [
        Release(node="b", why="did not stop its workers in time"),
        Finish(exit_code=130, why="stopped by SIGINT"),
    ]


def test_all_nodes_that_do_not_stop_are_released():
    """If no node stops in the time that it may take to start, all are released and the machine gathers."""
    machine = running_machine("a", "b", "c")
    handle_all(machine, lost("a", 10.0))
    assert handle_all(machine, tick(20.0)) == [SetTimer(at=130.0, why="the time has not come")]
    assert handle_all(machine, tick(130.0)) == [
        Release(node="b", why="did not stop its workers in time"),
        Release(node="c", why="did not stop its workers in time"),
        SetTimer(at=730.0, why="0 of 3 nodes"),
    ]


# Signals to the driver.


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_stop_request_while_running(signal, code):
    """Workers get the same signal and the grace; the exit code is 128 plus the signal."""
    machine = running_machine("a", "b")
    assert handle_all(machine, stop_requested(signal, 5.0)) == [
        stop(1, "a", "b", grace=30.0, why=f"{signal} received", signal=signal),
        stopping_timer(45.0),
    ]
    assert handle_all(machine, stopped("a", 6.0), stopped("b", 7.0)) == [
        Finish(exit_code=code, why=f"stopped by {signal}"),
    ]


def test_stop_request_while_gathering():
    """Nothing runs yet, so the run ends at once."""
    assert handle_all(gathering_machine(job()), stop_requested("SIGINT", 5.0)) == [
        Finish(exit_code=130, why="stopped by SIGINT")
    ]


def test_stop_request_while_starting():
    """Workers that may have been started are stopped."""
    machine = gathering_machine(job(1))
    handle_all(machine, joined("a"))
    assert handle_all(machine, stop_requested("SIGTERM", 5.0)) == [
        stop(1, "a", grace=30.0, why="SIGTERM received"),
        stopping_timer(45.0),
    ]


def test_stop_request_while_stopping():
    """The stop continues, but no other attempt follows, and nodes are not waited for any longer."""
    machine = running_machine("a", "b")
    assert handle_all(machine, lost("a", 5.0))[-1] == stopping_timer(125.0)
    timer = SetTimer(at=16.0, why="the run ends when all workers are gone")
    assert handle_all(machine, stop_requested("SIGINT", 6.0)) == [timer]
    assert handle_all(machine, stopped("b", 7.0)) == [Finish(exit_code=130, why="stopped by SIGINT")]


def test_second_stop_request():
    """The second signal ends the run without grace."""
    machine = running_machine("a", "b")
    handle_all(machine, stop_requested("SIGINT", 5.0), stopped("a", 6.0))
    assert handle_all(machine, stop_requested("SIGINT", 7.0)) == [
        stop(1, "a", "b", grace=0.0, why="SIGINT again"),
        Finish(exit_code=130, why="stopped by SIGINT"),
    ]


def test_stop_request_after_the_end():
    """Events in DONE change nothing."""
    machine = running_machine("a")
    handle_all(machine, finished("a", 5.0))
    assert handle_all(machine, stop_requested("SIGINT", 6.0)) == []
    assert machine.phase is Phase.DONE


def test_forwarded_signals_go_to_all_unfinished_nodes():
    """Nodes whose workers have finished get no signal; the run continues."""
    machine = running_machine("a", "b")
    assert handle_all(machine, forward_requested("SIGUSR1", 5.0)) == [sigusr(1, 1, "a", "b")]
    handle_all(machine, finished("a", 6.0))
    assert handle_all(machine, forward_requested("SIGUSR1", 7.0)) == [sigusr(1, 1, "b")]
    assert machine.phase is Phase.RUNNING


def test_signals_are_not_forwarded_before_and_after_an_attempt():
    """Signals are not forwarded before an attempt runs, nor while its workers stop."""
    machine = gathering_machine(job(1))
    orders = handle_all(machine, forward_requested("SIGUSR1", 1.0), joined("a"), started("a", 2.0))
    orders += handle_all(machine, stop_requested("SIGTERM", 4.0), forward_requested("SIGUSR1", 5.0))
    assert sigusr(1, 1, "a") not in orders


def test_signals_are_held_while_workers_start():
    """Signals are held until all workers are started; then each different signal is forwarded once."""
    machine = gathering_machine(job(2))
    handle_all(machine, joined("a"), joined("b"), started("a", 1.0))
    assert handle_all(machine, *(forward_requested(name, 2.0) for name in ("SIGUSR1", "SIGUSR2", "SIGUSR1"))) == []
    assert handle_all(machine, started("b", 3.0)) == [sigusr(1, 1, "a", "b"), sigusr(2, 1, "a", "b")]
    assert handle_all(machine, forward_requested("SIGUSR1", 4.0)) == [sigusr(1, 1, "a", "b")]


def test_held_signals_pass_to_the_next_attempt():
    """If an attempt fails in STARTING, the next attempt gets its held signals, once."""
    machine = gathering_machine(job(2, max_restarts=2))
    handle_all(machine, joined("a"), joined("b"), forward_requested("SIGUSR1", 1.0), failed("a", 2.0))
    assert handle_all(machine, started("a", 3.0, attempt=2), started("b", 3.0, attempt=2)) == [sigusr(1, 2, "a", "b")]
    handle_all(machine, failed("a", 4.0, attempt=2))
    assert handle_all(machine, started("a", 5.0, attempt=3), started("b", 5.0, attempt=3)) == [], (
        "the signal was forwarded twice"
    )


# Late reports.


@pytest.mark.parametrize("report", [started, finished, failed, stopped, checkpointed, hung])
@pytest.mark.parametrize("attempt", [1, 3])
def test_reports_of_another_attempt_are_ignored(report, attempt):
    """Reports of the first or third attempt do not affect the second."""
    machine = running_machine("a", "b", max_restarts=1)
    handle_all(machine, failed("a", 5.0))
    assert handle_all(machine, report("b", 6.0, attempt=attempt)) == []
    assert (machine.phase, machine.state.awaited, machine.restarts) == (Phase.STARTING, {"a", "b"}, 1)


@pytest.mark.parametrize("report", [started, finished, failed, stopped, checkpointed, lost, draining])
def test_reports_of_released_nodes_are_ignored(report):
    """Reports of a released node change nothing."""
    machine = gathering_machine(job("1:2", start_timeout=60.0))
    handle_all(machine, joined("a"), joined("b"), started("a"), tick(60.0))
    assert machine.attempt == 2
    facts = {} if report in (lost, draining) else {"attempt": 2}
    assert handle_all(machine, report("b", 61.0, **facts)) == []
    assert machine.state.awaited == {"a"}


def test_simultaneous_failures_spend_one_restart():
    """If all ranks fail because one did, only the first reported failure spends a restart."""
    machine = running_machine("a", "b", max_restarts=3)
    handle_all(machine, failed("a", 5.0), failed("b", 5.1), failed("a", 5.2))
    assert (machine.attempt, machine.restarts) == (2, 1)


def test_reason_names_the_root_cause():
    """Of failures that are reported together, the reason names the root cause."""
    machine = running_machine("a", max_restarts=1)
    peer = failure("a", 5.0, rank=0, **raised("RuntimeError", "Connection reset by peer"))
    cause = failure("a", 5.1, rank=1, **raised("ValueError", "NaN"))
    assert handle_all(machine, exited("a", 5.2, peer, cause))[1] == launch(
        2, "a", why="rank 1 on a raised ValueError: NaN; restart 1 of 1"
    )
