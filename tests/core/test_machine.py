"""The decisions, one conversation each: what the machine is told, and all that it orders then."""

from __future__ import annotations

import pytest
from story import (
    asked,
    begun,
    checkpointed,
    draining,
    exited,
    failed,
    failure,
    finished,
    forward,
    gone_by,
    granted,
    hung,
    job,
    joined,
    launch,
    lost,
    raised,
    run_on,
    running,
    start_by,
    started,
    stop,
    stopped,
    tick,
    told,
)

from raylaunch.core.actions import Finish, Forward, Release, WakeAt
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase

KILLED = "rank 1 on a was killed by SIGKILL"


def usr(number: int, attempt: int, *nodes: str) -> Forward:
    signal = f"SIGUSR{number}"
    return Forward(attempt=attempt, nodes=nodes, signal=signal, why=f"{signal} received")


def a_moment_later(machine: Machine) -> float:
    return machine.now + 0.5


# Gathering.


def test_the_first_order_is_to_be_woken_when_the_placement_takes_too_long():
    """Before any event, the machine asks for nothing but the time."""
    assert Machine(job()).start() == [WakeAt(at=300.0, why="the cluster must give the nodes by then")]


def test_a_fixed_size_starts_when_all_are_there():
    """A job of two nodes starts when the second joins, and not before."""
    machine = begun(job(2))
    assert told(machine, joined("a", 1.0)) == []
    assert machine.status == "1 of 2 nodes"
    assert told(machine, joined("b", 2.0)) == [launch(1, "a", "b", why="2 of 2 nodes; b joined"), start_by(122.0)]
    assert machine.status == "starting 4 workers on 2 nodes"


def test_a_place_is_no_node_yet():
    """It counts when its agent is up."""
    machine = begun(job(1))
    assert told(machine, granted("a", 1.0)) == []
    assert (machine.phase, len(machine.nodes)) == (Phase.GATHERING, 0)


def test_an_elastic_job_waits_for_the_last_call():
    """MIN nodes open the last call; when it is over, all who came take part."""
    machine = begun(job("2:4"))
    assert told(machine, joined("a", 1.0)) == []
    assert told(machine, joined("b", 2.0)) == [WakeAt(at=7.0, why="2 of 2 to 4 nodes")]
    assert told(machine, joined("c", 3.0)) == []
    assert told(machine, tick(7.0)) == [
        launch(1, "a", "b", "c", why="3 of 2 to 4 nodes; last call is over"),
        start_by(127.0),
    ]


def test_an_elastic_job_does_not_wait_when_it_is_full():
    """The last call ends early when MAX nodes are there."""
    machine = begun(job("1:2"))
    assert told(machine, joined("a", 1.0), joined("b", 2.0)) == [
        WakeAt(at=6.0, why="1 of 1 to 2 nodes"),
        launch(1, "a", "b", why="2 of 1 to 2 nodes; b joined"),
        start_by(122.0),
    ]


@pytest.mark.parametrize(("gone", "ordered"), [(lost, []), (draining, [Release(node="b", why="it is being drained")])])
def test_the_last_call_is_off_when_too_few_are_left(gone, ordered):
    """Who leaves during the last call takes it along where fewer than MIN are left."""
    machine = begun(job("2:4"))
    told(machine, joined("a", 1.0), joined("b", 2.0))
    assert told(machine, gone("b", 3.0)) == [*ordered, WakeAt(at=300.0, why="1 of 2 to 4 nodes")]
    assert told(machine, tick(7.0)) == [WakeAt(at=300.0, why="1 of 2 to 4 nodes")]
    assert machine.phase is Phase.GATHERING


def test_the_last_call_goes_on_when_enough_are_left():
    """One of three may leave during the last call of a job that needs two."""
    machine = begun(job("2:4"))
    told(machine, joined("a", 1.0), joined("b", 2.0), joined("c", 2.0))
    assert told(machine, lost("b", 3.0)) == []
    assert told(machine, tick(7.0)) == [
        launch(1, "a", "c", why="2 of 2 to 4 nodes; last call is over"),
        start_by(127.0),
    ]


def test_the_cluster_gives_too_little_in_time():
    """Too few nodes after `placement_timeout`: exit 3."""
    machine = begun(job(2, placement_timeout=60.0))
    told(machine, joined("a", 1.0))
    assert told(machine, tick(60.0)) == [Finish(exit_code=3, why="1 of 2 nodes after 60 s")]
    assert machine.phase is Phase.DONE


def test_enough_nodes_are_enough_when_the_time_is_up():
    """Where `placement_timeout` is over before the last call is, the job starts with who is there."""
    machine = begun(job("1:4", placement_timeout=10.0, last_call=60.0))
    assert told(machine, joined("a", 1.0)) == []
    assert told(machine, tick(10.0)) == [
        launch(1, "a", why="1 of 1 to 4 nodes; no more time to wait"),
        start_by(130.0),
    ]


def test_a_tick_too_early_asks_for_another():
    """A clock that runs ahead does no harm."""
    machine = begun(job())
    assert told(machine, tick(1.0)) == [WakeAt(at=300.0, why="0 of 2 nodes")]


def test_a_deadline_that_is_past_already_wakes_at_once():
    """Facts may wait in line past a deadline: what is asked for then is not in the past."""
    machine = begun(job("2:4", placement_timeout=5.0, last_call=2.0))
    told(machine, joined("a", 1.0), joined("b", 1.0))
    assert told(machine, lost("b", 9.0)) == [WakeAt(at=9.0, why="1 of 2 to 4 nodes")]


# Starting and running.


def test_all_started_is_running():
    """The attempt runs when the last node says so; then nothing is waited for."""
    machine = begun(job(2))
    told(machine, joined("a"), joined("b"), started("b"))
    assert machine.phase is Phase.STARTING
    assert told(machine, started("a", 1.0)) == []
    assert (machine.phase, machine.status) == (Phase.RUNNING, "4 workers on 2 nodes")
    assert told(machine, tick(120.0)) == []


def test_all_finished_is_the_end():
    """Exit 0 when the last node's workers have finished."""
    machine = running("a", "b")
    assert told(machine, finished("b", 5.0)) == []
    assert told(machine, finished("a", 6.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_quick_scripts_may_finish_while_others_start():
    """A node's workers can be done before another's are forked."""
    machine = begun(job(2))
    told(machine, joined("a"), joined("b"), started("a"), finished("a"))
    assert told(machine, started("b"), finished("b")) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_a_crash_is_answered_in_one_breath():
    """Stop without grace and the next attempt, in one answer: no waiting in between."""
    machine = running("a", "b", max_restarts=3)
    why = f"{KILLED}; restart 1 of 3"
    assert told(machine, failed("a", 5.0)) == [
        stop(1, "a", "b", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_by(125.0),
    ]


def test_a_crash_while_starting_is_a_crash():
    """It spends a restart as any other."""
    machine = begun(job(2, max_restarts=1))
    told(machine, joined("a"), joined("b"), started("a"))
    assert [type(action).__name__ for action in told(machine, failed("a", 1.0))] == ["Stop", "Launch", "WakeAt"]
    assert machine.restarts == 1


def test_workers_that_end_unasked_have_failed():
    """Even where the node claims to have stopped them itself: nobody may be left to wait for."""
    machine = running("a", max_restarts=1)
    assert told(machine, failed("a", 5.0, stopped=True))[1] == launch(2, "a", why=f"{KILLED}; restart 1 of 1")


def test_a_crash_takes_joined_nodes_along():
    """Nodes that wait for their last call are taken at the next start, which comes first."""
    machine = running("a", nnodes="1:3", max_restarts=1)
    told(machine, joined("b", 10.0))
    why = f"{KILLED}; restart 1 of 1"
    assert told(machine, failed("a", 11.0)) == [
        stop(1, "a", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_by(131.0),
    ]
    assert told(machine, tick(15.0)) == [WakeAt(at=131.0, why="the time has not come")]


# The end of patience.


def test_no_restarts_were_allowed():
    """Without a budget the first failure ends the run: politely, exit 1."""
    machine = running("a", "b")
    why = f"{KILLED}; no restarts were allowed"
    assert told(machine, failed("a", 5.0)) == [stop(1, "a", "b", grace=30.0, why=why), gone_by(45.0)]
    assert told(machine, stopped("a", 6.0)) == []
    assert told(machine, stopped("b", 7.0)) == [Finish(exit_code=1, why=why)]


def test_the_budget_is_spent():
    """As many restarts as were allowed, and then the end."""
    machine = running("a", max_restarts=2)
    for attempt in (1, 2):
        told(machine, failed("a", a_moment_later(machine), attempt=attempt))
        run_on(machine, a_moment_later(machine))
    why = f"{KILLED}; all 2 restarts are used"
    assert told(machine, failed("a", 5.0, attempt=3)) == [stop(3, "a", grace=30.0, why=why), gone_by(45.0)]
    assert told(machine, stopped("a", 6.0, attempt=3)) == [Finish(exit_code=1, why=why)]


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
def test_the_hopeless_is_not_tried_again(facts, why):
    """A script that is not there, or cannot be imported, will not be there the next time."""
    machine = running("a", max_restarts=10)
    why = f"rank 1 on a {why}"
    assert told(machine, failed("a", 5.0, **facts)) == [stop(1, "a", grace=30.0, why=why), gone_by(45.0)]


def crash_three_times(machine: Machine, *, every: float, **facts: object) -> None:
    for attempt in (1, 2, 3):
        told(machine, failed("a", machine.now + every, attempt=attempt, **facts))
        run_on(machine, machine.now)


def test_the_same_failure_three_times_within_a_minute():
    """The third time at the same place is the last, whatever is left of the budget."""
    machine = running("a", max_restarts=10)
    crash_three_times(machine, every=20.0, **raised("ValueError", "NaN"))
    assert machine.phase is Phase.STOPPING
    assert machine.status == "rank 1 on a raised ValueError: NaN; the same failure 3 times within 60 s"


def test_the_same_failure_seldom_is_not_hopeless():
    """Three times in two hours is what the budget is for."""
    machine = running("a", max_restarts=10, exclude_after=0)
    crash_three_times(machine, every=3600.0, **raised("ValueError", "NaN"))
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 4)


def test_deaths_by_signal_are_never_the_same():
    """A kill comes from outside, and says nothing of where the program was."""
    machine = running("a", max_restarts=10, exclude_after=0)
    crash_three_times(machine, every=1.0)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 4)


def test_other_failures_between_make_a_difference():
    """Only three in a row count as the same."""
    machine = running("a", max_restarts=10, exclude_after=0)
    for attempt, facts in enumerate((raised("ValueError"), {}, raised("ValueError"), raised("ValueError")), start=1):
        told(machine, failed("a", machine.now + 1.0, attempt=attempt, **facts))
        run_on(machine, machine.now)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 5)


def test_words_of_an_attempt_that_is_over_change_nothing():
    """No other has begun yet, but all that it had is gone: it cannot fail again, nor finish."""
    machine = running("a", "b", max_restarts=3)
    told(machine, finished("a", 5.0), lost("b", 6.0), stopped("a", 7.0))
    assert machine.phase is Phase.GATHERING
    assert told(machine, finished("a", 8.0), failed("a", 8.0), started("a", 8.0), stopped("a", 8.0)) == []
    assert (machine.phase, machine.restarts) == (Phase.GATHERING, 0)


def test_a_node_that_finishes_before_it_says_that_it_has_started():
    """It has: the others are not waited for any longer than it takes them."""
    machine = begun(job("1:2"))
    told(machine, joined("a", 1.0), joined("b", 1.0), started("a", 2.0))
    told(machine, finished("b", 3.0))
    assert machine.phase is Phase.RUNNING
    assert told(machine, finished("a", 4.0))[-1] == Finish(exit_code=0, why="all 4 workers finished")


def test_the_only_worker_finishes():
    """It is one."""
    machine = begun(job(1))
    told(machine, joined("a", 1.0, nproc=1), started("a", 2.0))
    assert told(machine, finished("a", 3.0)) == [Finish(exit_code=0, why="the worker finished")]


def test_failures_while_stopping_change_nothing():
    """What breaks in a world that ends is only written down."""
    machine = running("a", "b", nnodes="1:2", max_restarts=3)
    told(machine, draining("a", 5.0), checkpointed("a", 5.5, step=None))
    assert told(machine, failed("b", 6.0), finished("a", 6.0)) == []
    assert (machine.restarts, len(machine.failures)) == (0, 1)


# Nodes are lost.


def test_a_lost_node_is_replaced_by_a_spare():
    """With enough nodes left the next attempt starts at once, and costs no restart."""
    machine = running("a", "b", nnodes="2:2")
    told(machine, joined("c", 2.0))
    why = "a was lost: its agent died"
    assert told(machine, lost("a", 5.0)) == [
        stop(1, "b", grace=0.0, why=why),
        launch(2, "b", "c", why=why),
        start_by(125.0),
    ]
    assert machine.restarts == 0


def test_an_elastic_job_goes_on_without_a_lost_node():
    """Down to MIN nodes, the rest goes on at once."""
    machine = running("a", "b", "c", nnodes="2:3")
    assert told(machine, lost("b", 9.0))[1] == launch(2, "a", "c", why="b was lost: its agent died")


def test_below_min_the_rest_is_stopped_and_waits():
    """Too few nodes: stop who is left, wait for others, give up after `join_timeout` with exit 3."""
    machine = running("a", "b", join_timeout=100.0)
    assert told(machine, lost("a", 5.0)) == [
        stop(1, "b", grace=0.0, why="a was lost: its agent died"),
        gone_by(15.0),
    ]
    assert machine.phase is Phase.STOPPING
    assert told(machine, stopped("b", 6.0)) == [WakeAt(at=106.0, why="1 of 2 nodes")]
    assert machine.phase is Phase.GATHERING
    assert told(machine, tick(106.0)) == [Finish(exit_code=3, why="1 of 2 nodes after 100 s")]


def test_below_min_another_node_may_come():
    """The replacement starts the next attempt; who was there before keeps the first ranks."""
    machine = running("a", "b")
    told(machine, lost("a", 5.0), stopped("b", 6.0))
    assert told(machine, joined("A", 50.0)) == [launch(2, "b", "A", why="2 of 2 nodes; A joined"), start_by(170.0)]


def test_the_only_node_is_lost():
    """Nobody is left to stop; that the attempt is over is said all the same, and then others are waited for."""
    machine = running("a")
    assert told(machine, lost("a", 5.0)) == [
        stop(1, grace=0.0, why="a was lost: its agent died"),
        WakeAt(at=605.0, why="0 of 1 nodes"),
    ]
    assert machine.phase is Phase.GATHERING


def test_another_is_lost_while_stopping():
    """A node that is gone is not waited for."""
    machine = running("a", "b", "c")
    told(machine, lost("a", 5.0), stopped("b", 6.0))
    assert told(machine, lost("c", 7.0)) == [WakeAt(at=607.0, why="1 of 3 nodes")]


def test_a_survivor_is_lost_while_gathering():
    """It does not count any more, though it had a part in the last attempt: no last call for too few."""
    machine = running("a", "b", nnodes="2:4")
    told(machine, lost("b", 10.0), stopped("a", 11.0), joined("c", 12.0))
    assert machine.last_call == 17.0
    assert told(machine, lost("a", 13.0)) == [WakeAt(at=611.0, why="1 of 2 to 4 nodes")]
    assert told(machine, tick(17.0)) == [WakeAt(at=611.0, why="1 of 2 to 4 nodes")]


def test_a_spare_node_is_lost():
    """Nobody misses it."""
    machine = running("a")
    assert told(machine, joined("b", 2.0), lost("b", 3.0), tick(9.0)) == []


def test_a_node_is_lost_after_it_finished():
    """Its work is done: the others finish theirs, and all are counted."""
    machine = running("a", "b")
    assert told(machine, finished("a", 5.0), lost("a", 6.0)) == []
    assert told(machine, finished("b", 7.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_a_node_that_finished_is_lost_while_the_others_stop():
    """Nobody is left to wait for, so what follows follows at once."""
    machine = running("a", "b")
    why = f"{KILLED.replace('on a', 'on b')}; no restarts were allowed"
    told(machine, finished("a", 5.0), failed("b", 6.0), stopped("b", 7.0))
    assert told(machine, lost("a", 8.0)) == [Finish(exit_code=1, why=why)]


def test_a_node_is_lost_before_it_finished():
    """Though the other one has finished already, the world is broken."""
    machine = running("a", "b")
    told(machine, finished("a", 5.0))
    assert told(machine, lost("b", 6.0))[0] == stop(1, "a", grace=0.0, why="b was lost: its agent died")


# Nodes that do not answer.


def test_a_node_that_does_not_start_is_given_up():
    """After `start_timeout` it is released; with enough others the next attempt starts at once."""
    machine = begun(job("2:3", start_timeout=60.0))
    told(machine, joined("a"), joined("b"), joined("c"), started("a", 1.0), started("c", 1.0))
    why = "b did not start its workers in time"
    assert told(machine, tick(60.0)) == [
        Release(node="b", why="did not start its workers in time"),
        stop(1, "a", "c", grace=0.0, why=why),
        launch(2, "a", "c", why=why),
        start_by(120.0),
    ]


def test_too_few_nodes_start():
    """Below MIN, the started ones are stopped and others waited for."""
    machine = begun(job(2, start_timeout=60.0))
    told(machine, joined("a"), joined("b"), started("a", 1.0))
    assert told(machine, tick(60.0)) == [
        Release(node="b", why="did not start its workers in time"),
        stop(1, "a", grace=0.0, why="b did not start its workers in time"),
        gone_by(70.0),
    ]


def test_a_node_that_does_not_stop_is_given_up():
    """Ten seconds beyond the grace it is released, and what was to follow follows."""
    machine = running("a", "b", shutdown_timeout=5.0)
    told(machine, asked("SIGINT", 10.0), stopped("a", 11.0))
    assert told(machine, tick(25.0)) == [
        Release(node="b", why="did not stop its workers in time"),
        Finish(exit_code=130, why="stopped by SIGINT"),
    ]


def test_nobody_stops():
    """All are given up, and others are waited for."""
    machine = running("a", "b", "c")
    told(machine, lost("a", 10.0))
    assert told(machine, tick(20.0)) == [
        Release(node="b", why="did not stop its workers in time"),
        Release(node="c", why="did not stop its workers in time"),
        WakeAt(at=620.0, why="0 of 3 nodes"),
    ]


# People.


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_asked_to_stop_while_running(signal, code):
    """Workers get the same signal, and their grace; the exit code tells the signal."""
    machine = running("a", "b")
    assert told(machine, asked(signal, 5.0)) == [
        stop(1, "a", "b", grace=30.0, why=f"{signal} received", signal=signal),
        gone_by(45.0),
    ]
    assert told(machine, stopped("a", 6.0), stopped("b", 7.0)) == [
        Finish(exit_code=code, why=f"stopped by {signal}"),
    ]


def test_asked_to_stop_while_gathering():
    """Nothing runs yet, so it is over at once."""
    assert told(begun(job()), asked("SIGINT", 5.0)) == [Finish(exit_code=130, why="stopped by SIGINT")]


def test_asked_to_stop_while_starting():
    """What has been started is stopped."""
    machine = begun(job(1))
    told(machine, joined("a"))
    assert told(machine, asked("SIGTERM", 5.0)) == [stop(1, "a", grace=30.0, why="SIGTERM received"), gone_by(45.0)]


def test_asked_to_stop_while_stopping():
    """The stop goes on as it was, but no other attempt follows."""
    machine = running("a", "b")
    told(machine, lost("a", 5.0))
    assert told(machine, asked("SIGINT", 6.0)) == []
    assert told(machine, stopped("b", 7.0)) == [Finish(exit_code=130, why="stopped by SIGINT")]


def test_asked_to_stop_twice():
    """The second time is without grace, and the end."""
    machine = running("a", "b")
    told(machine, asked("SIGINT", 5.0), stopped("a", 6.0))
    assert told(machine, asked("SIGINT", 7.0)) == [
        stop(1, "a", "b", grace=0.0, why="SIGINT again"),
        Finish(exit_code=130, why="stopped by SIGINT"),
    ]


def test_asked_to_stop_when_all_is_done():
    """Too late to change anything."""
    machine = running("a")
    told(machine, finished("a", 5.0))
    assert told(machine, asked("SIGINT", 6.0)) == []
    assert machine.phase is Phase.DONE


def test_forwarded_signals_reach_all_workers_and_the_run_goes_on():
    """Nodes whose workers have finished are left in peace."""
    machine = running("a", "b")
    assert told(machine, forward("SIGUSR1", 5.0)) == [usr(1, 1, "a", "b")]
    told(machine, finished("a", 6.0))
    assert told(machine, forward("SIGUSR1", 7.0)) == [usr(1, 1, "b")]
    assert machine.phase is Phase.RUNNING


def test_forwarded_signals_need_somebody_who_can_handle_them():
    """Before an attempt, and while workers stop, nobody gets them."""
    machine = begun(job(1))
    orders = told(machine, forward("SIGUSR1", 1.0), joined("a"), started("a", 2.0))
    orders += told(machine, asked("SIGTERM", 4.0), forward("SIGUSR1", 5.0))
    assert usr(1, 1, "a") not in orders


def test_signals_wait_until_all_workers_are_started():
    """Some may be up before the others are: who saw them sends it, and no worker is to miss it. Each comes once."""
    machine = begun(job(2))
    told(machine, joined("a"), joined("b"), started("a", 1.0))
    assert told(machine, *(forward(name, 2.0) for name in ("SIGUSR1", "SIGUSR2", "SIGUSR1"))) == []
    assert told(machine, started("b", 3.0)) == [usr(1, 1, "a", "b"), usr(2, 1, "a", "b")]
    assert told(machine, forward("SIGUSR1", 4.0)) == [usr(1, 1, "a", "b")]


def test_signals_wait_for_the_next_attempt_if_this_one_breaks_before():
    """The workers that were to get it never were a world."""
    machine = begun(job(2, max_restarts=2))
    told(machine, joined("a"), joined("b"), forward("SIGUSR1", 1.0), failed("a", 2.0))
    assert told(machine, started("a", 3.0, attempt=2), started("b", 3.0, attempt=2)) == [usr(1, 2, "a", "b")]
    told(machine, failed("a", 4.0, attempt=2))
    assert told(machine, started("a", 5.0, attempt=3), started("b", 5.0, attempt=3)) == [], "once is enough"


# Words that come too late.


@pytest.mark.parametrize("word", [started, finished, failed, stopped, checkpointed, hung])
@pytest.mark.parametrize("attempt", [1, 3])
def test_words_of_another_attempt_are_dropped(word, attempt):
    """What is said of the first attempt does not touch the second."""
    machine = running("a", "b", max_restarts=1)
    told(machine, failed("a", 5.0))
    assert told(machine, word("b", 6.0, attempt=attempt)) == []
    assert (machine.phase, machine.awaited, machine.restarts) == (Phase.STARTING, {"a", "b"}, 1)


@pytest.mark.parametrize("word", [started, finished, failed, stopped, checkpointed, lost, draining])
def test_words_of_nodes_that_are_given_up_are_dropped(word):
    """Whatever a released node still says, it has no part any more."""
    machine = begun(job("1:2", start_timeout=60.0))
    told(machine, joined("a"), joined("b"), started("a"), tick(60.0))
    assert machine.attempt == 2
    facts = {} if word in (lost, draining) else {"attempt": 2}
    assert told(machine, word("b", 61.0, **facts)) == []
    assert machine.awaited == {"a"}


def test_the_crash_of_many_is_one_crash():
    """All ranks fail when one does; only the first to be heard of spends a restart."""
    machine = running("a", "b", max_restarts=3)
    told(machine, failed("a", 5.0), failed("b", 5.1), failed("a", 5.2))
    assert (machine.attempt, machine.restarts) == (2, 1)


def test_the_cause_among_those_told_together_is_named():
    """Of failures that are told as one, the reason names the one that began it."""
    machine = running("a", max_restarts=1)
    peer = failure("a", 5.0, rank=0, **raised("RuntimeError", "Connection reset by peer"))
    cause = failure("a", 5.1, rank=1, **raised("ValueError", "NaN"))
    assert told(machine, exited("a", 5.2, peer, cause))[1] == launch(
        2, "a", why="rank 1 on a raised ValueError: NaN; restart 1 of 1"
    )
