"""The decisions about what goes wrong again and again: what is pardoned, who is left out, what is slowed down."""

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
    gone_by,
    hung,
    job,
    joined,
    launch,
    lost,
    progressed,
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

from raylaunch.core.actions import Finish, Readmit, Release, Shun, WakeAt
from raylaunch.core.events import NodeJoined, WorkersHung
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase

ECHO = raised("RuntimeError", "Connection reset by peer")
NAN = raised("ValueError", "NaN")
LOST_B = "b was lost: its agent died"


def fail(machine: Machine, node: str, after: float = 20.0, **facts: object) -> None:
    """A worker of the node fails, and the next attempt runs where it may."""
    told(machine, failed(node, machine.now + after, attempt=machine.attempt, **facts))
    if machine.phase is Phase.STOPPING:
        told(machine, *(stopped(node, machine.now, attempt=machine.attempt) for node in sorted(machine.awaited)))
    if machine.phase is Phase.STARTING:
        run_on(machine, machine.now)


# Failures that a lost node explains.


def test_what_peers_say_of_a_node_that_is_gone_costs_nothing():
    """They see the closed connection at once; the node counts as lost seconds later."""
    machine = running("a", "b", "c", nnodes="2:3", max_restarts=1)
    told(machine, failed("a", 10.0, **ECHO))
    assert (machine.restarts, machine.attempt) == (1, 2)
    assert told(machine, lost("b", 15.0))[1] == launch(3, "a", "c", why=LOST_B)
    assert machine.restarts == 0


def test_the_attempt_in_between_may_fail_of_it_too():
    """As long as the node is not known to be gone, each attempt has a part in it."""
    machine = running("a", "b", "c", nnodes="2:3", max_restarts=2)
    told(machine, failed("a", 10.0, **ECHO), failed("c", 12.0, attempt=2, **ECHO))
    assert machine.restarts == 2
    told(machine, lost("b", 15.0))
    assert (machine.restarts, machine.phase) == (0, Phase.STARTING)


def test_a_worker_that_was_killed_on_a_node_that_is_then_lost_costs_nothing():
    """Machines that go down kill their processes first."""
    machine = running("a", "b", nnodes="1:2", max_restarts=1)
    told(machine, failed("b", 10.0))
    assert machine.restarts == 1
    assert told(machine, lost("b", 15.0))[1] == launch(3, "a", why=LOST_B)
    assert machine.restarts == 0


@pytest.mark.parametrize(("who", "facts"), [("a", ECHO), ("b", {}), ("b", {"exit_code": -15})])
def test_a_run_without_restarts_survives_the_loss_of_a_node(who, facts):
    """It was about to end for the failure; then the node is lost, which explains it, and the run goes on."""
    machine = running("a", "b", nnodes="1:2")
    told(machine, failed(who, 10.0, **facts))
    assert machine.ending is not None
    told(machine, stopped("a", 11.0))
    assert told(machine, lost("b", 15.0)) == [launch(2, "a", why=LOST_B), start_by(135.0)]


def test_a_run_without_restarts_waits_for_another_node():
    """The same where the node is needed; and the others may still be stopping."""
    machine = running("a", "b")
    told(machine, failed("a", 10.0, **ECHO))
    assert told(machine, lost("b", 15.0)) == []
    assert (machine.phase, machine.status) == (Phase.STOPPING, LOST_B)
    assert told(machine, stopped("a", 16.0)) == [WakeAt(at=616.0, why="1 of 2 nodes")]


@pytest.mark.parametrize(
    ("who", "facts", "when"),
    [
        ("a", ECHO, 40.1),  # long after
        ("b", {}, 40.1),
        ("a", {}, 11.0),  # killed on another node
        ("a", NAN, 11.0),  # the script's own
        ("b", NAN, 11.0),
        ("b", {"exit_code": 1}, 11.0),
        ("b", {"evidence": "out of memory"}, 11.0),  # the kernel's doing, for the script's hunger
        ("b", {"exit_code": -11}, 11.0),
    ],
)
def test_a_lost_node_explains_no_more_than_it_can(who, facts, when):
    """The restart is spent, whoever is lost afterwards."""
    machine = running("a", "b", "c", nnodes="1:3", max_restarts=1)
    told(machine, failed(who, 10.0, **facts), lost("b", when))
    assert machine.restarts == 1


def test_a_lost_node_explains_until_half_a_minute_is_over():
    """The last moment."""
    machine = running("a", "b", nnodes="1:2", max_restarts=1)
    told(machine, failed("a", 10.0, **ECHO), lost("b", 40.0))
    assert machine.restarts == 0


def test_a_failure_is_pardoned_once():
    """The second lost node gives nothing back."""
    machine = running("a", "b", "c", nnodes="1:3", max_restarts=3)
    told(machine, failed("a", 9.0, **NAN), failed("a", 10.0, attempt=2, **ECHO), lost("b", 11.0), lost("c", 12.0))
    assert machine.restarts == 1


def test_a_spare_that_is_lost_explains_nothing():
    """It had no part in the attempt."""
    machine = running("a", "b", max_restarts=1)
    told(machine, joined("c", 5.0), failed("a", 10.0, **ECHO), lost("c", 11.0))
    assert machine.restarts == 1


def test_a_person_who_wants_the_end_gets_it():
    """Though the failure before it turns out to be explained."""
    machine = running("a", "b", nnodes="1:2", max_restarts=1)
    told(machine, failed("a", 10.0, **ECHO), started("a", 10.1, attempt=2), asked("SIGINT", 11.0))
    assert told(machine, lost("b", 12.0)) == []
    assert told(machine, stopped("a", 13.0, attempt=2)) == [Finish(exit_code=130, why="stopped by SIGINT")]


def test_a_pardoned_failure_is_not_one_of_three():
    """The limit on equal failures within a minute does not count it."""
    machine = running("a", "b", "c", nnodes="1:3", max_restarts=9, exclude_after=0)
    killed = {"exit_code": -15}
    fail(machine, "a", 1.0, **NAN)
    fail(machine, "b", 1.0, **killed)
    told(machine, lost("b", machine.now + 1.0))
    run_on(machine, machine.now)
    fail(machine, "a", 1.0, **NAN)
    assert machine.phase is Phase.RUNNING
    fail(machine, "a", 1.0, **NAN)
    assert machine.phase is Phase.DONE


# Hosts that fail again and again.


def excluded(*nodes: str, host: str, nnodes: str = "1:9", **settings: object) -> tuple[Machine, list[object]]:
    """A machine on these nodes whose b failed twice by itself; and what is ordered at the second time."""
    machine = running(*nodes, **({"nnodes": nnodes, "max_restarts": 9, "exclude_after": 2} | settings))
    assert machine.nodes["b"].host == host
    fail(machine, "b", rank=2)
    actions = told(machine, failed("b", machine.now + 20.0, attempt=2))
    return machine, actions


def test_a_node_that_fails_too_often_is_left_out():
    """The world goes on without it, its agent is ended, and no place is taken there for a while."""
    machine, actions = excluded("a", "b", "c", host="host-of-b")
    left_out = "b is left out for 60 s after 2 failures"
    why = f"rank 1 on b was killed by SIGKILL; restart 2 of 9; {left_out}"
    now = machine.now
    assert actions == [
        Shun(host="host-of-b", why=left_out),
        Release(node="b", why=left_out),
        stop(2, "a", "c", grace=0.0, why=why),
        launch(3, "a", "c", why=why),
        WakeAt(at=now + 60.0, why="all workers must be started by then"),
    ]


def test_a_host_comes_back_when_its_time_is_over():
    """Until then, an agent that comes up there is not wanted; from then on it is as good as any."""
    machine, _ = excluded("a", "b", "c", host="host-of-b")
    run_on(machine, machine.now)
    now = machine.now
    assert told(machine, joined("b2", now + 5.0, host="host-of-b")) == [
        Release(node="b2", why="its host is left out at present")
    ]
    assert told(machine, tick(now + 60.0)) == [Readmit(host="host-of-b", why="its time is over")]
    assert told(machine, joined("b3", now + 61.0, host="host-of-b")) == [
        WakeAt(at=now + 66.0, why="b3 joined; more may come")
    ]


def test_a_host_that_fails_again_is_left_out_for_longer():
    """Twice as long each time, and only after as many failures as before."""
    machine, _ = excluded("a", "b", "c", host="host-of-b", nnodes="2:3")
    run_on(machine, machine.now)
    for node, seconds in (("A", 120.0), ("B", 240.0), ("C", 480.0)):
        told(machine, tick(machine.health.next_cooled or 0.0), joined(node, machine.now, host="host-of-b"))
        told(machine, *(checkpointed(one, machine.now, attempt=machine.attempt) for one in machine.roster))
        told(machine, *(stopped(one, machine.now, attempt=machine.attempt) for one in machine.roster))
        run_on(machine, machine.now)
        fail(machine, node)
        assert machine.health.excluded == ()
        fail(machine, node)
        assert machine.health.next_cooled == machine.now + seconds


def test_a_needed_node_is_left_out_for_a_moment():
    """Another has some seconds to come; else the node is taken back, and both are said."""
    machine, actions = excluded("a", "b", host="host-of-b", nnodes="2:9")
    now = machine.now
    left_out = "b is left out for 15 s after 2 failures, unless no other comes"
    why = f"rank 1 on b was killed by SIGKILL; restart 2 of 9; {left_out}"
    assert actions == [
        Shun(host="host-of-b", why=left_out),
        Release(node="b", why=left_out),
        stop(2, "a", grace=0.0, why=why),
        gone_by(now + 10.0),
    ]
    assert told(machine, stopped("a", now, attempt=2)) == [WakeAt(at=now + 15.0, why="1 of 2 to 9 nodes")]
    assert told(machine, tick(now + 15.0))[0] == Readmit(host="host-of-b", why="its time is over")
    told(machine, joined("b2", now + 17.0, host="host-of-b"), tick(now + 22.0))
    assert machine.roster == ("a", "b2")


def test_another_comes_in_place_of_a_needed_node():
    """Then the one that failed stays out for its time."""
    machine, _ = excluded("a", "b", host="host-of-b", nnodes="2:2")
    now = machine.now
    told(machine, stopped("a", now, attempt=2))
    assert told(machine, joined("c", now + 3.0))[0] == launch(3, "a", "c", why="2 of 2 nodes; c joined")


def test_a_node_that_is_needed_later_is_not_left_out_for_long():
    """Where others are lost while it is left out, the run does not wait for ever beside a host it could use."""
    machine, _ = excluded("a", "b", "c", host="host-of-b", nnodes="2:9")
    run_on(machine, machine.now)
    now = machine.now
    told(machine, lost("a", now + 1.0))
    assert told(machine, stopped("c", now + 2.0, attempt=3)) == [WakeAt(at=now + 17.0, why="1 of 2 to 9 nodes")]
    assert told(machine, tick(now + 17.0))[0] == Readmit(host="host-of-b", why="its time is over")


def test_a_needed_node_is_back_before_the_run_gives_up():
    """Where `join_timeout` is short, so is the time it is left out."""
    machine, actions = excluded("a", "b", host="host-of-b", nnodes="2:9", join_timeout=8.0)
    assert "left out for 4 s" in actions[0].why
    now = machine.now
    told(machine, stopped("a", now, attempt=2))
    assert told(machine, tick(now + 4.0))[0] == Readmit(host="host-of-b", why="its time is over")


def test_all_agents_of_a_host_are_left_out():
    """What is wrong there is wrong for all of them."""
    machine = begun(job("1:3", max_restarts=9, exclude_after=1))
    told(machine, joined("a"), joined("b", host="h"), joined("c", host="h"))
    run_on(machine, 1.0)
    actions = told(machine, failed("c", 20.0))
    left_out = "c is left out for 60 s after 1 failure"
    assert actions[:3] == [
        Shun(host="h", why=left_out),
        Release(node="b", why=left_out),
        Release(node="c", why=left_out),
    ]
    assert machine.roster == ("a",)


def test_what_fails_everywhere_is_no_hosts_fault():
    """The same error at the same place on two hosts is the script's."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9, exclude_after=2)
    for node in ("a", "b", "a", "b", "a"):
        fail(machine, node, 100.0, **NAN)
    assert machine.health.excluded == ()
    assert machine.roster == ("a", "b")


@pytest.mark.parametrize("facts", [{"exit_code": -11}, {"exit_code": 1}])
def test_a_script_that_dies_in_one_way_on_random_ranks_is_no_hosts_fault(facts):
    """By whichever signal, or with whichever exit code."""
    machine = running("a", "b", nnodes="1:2", max_restarts=99, exclude_after=3)
    for number, node in enumerate("abbaabbbba"):
        fail(machine, node, 100.0, **facts, rank=number)
    assert machine.health.excluded == ()


def test_what_always_fails_on_one_host_is_tried_elsewhere():
    """The same three times within a minute is hopeless; but not where the next attempt leaves that host out."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9)
    for _ in range(3):
        fail(machine, "b", **NAN)
    assert (machine.phase, machine.roster, machine.health.excluded) == (Phase.RUNNING, ("a",), ("host-of-b",))
    told(machine, failed("a", machine.now + 1.0, attempt=machine.attempt, **NAN))
    assert machine.ending.why == "rank 1 on a raised ValueError: NaN; the same failure 3 times within 60 s"


def test_what_always_fails_where_no_other_host_is_there_ends_the_run():
    """To wait for one would only put off the end of most runs of which this is true."""
    machine = running("a", "b", max_restarts=9)
    for _ in range(3):
        fail(machine, "b", **NAN)
    assert machine.phase is Phase.DONE


def test_what_peers_say_blames_nobody():
    """An echo is of another node's making."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    fail(machine, "b", **ECHO)
    assert machine.roster == ("a", "b")


def test_nobody_is_left_out_where_that_is_off():
    """`exclude_after: 0`."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9, exclude_after=0)
    for _ in range(8):
        fail(machine, "b")
    assert machine.roster == ("a", "b")


def test_nodes_of_unknown_hosts_are_not_left_out():
    """Where the cluster does not say which machine an agent runs on."""
    machine = begun(job(1, max_restarts=9, exclude_after=1))
    told(machine, NodeJoined(at=0.0, node="a", address="10.0.0.1", nproc=2))
    run_on(machine, 1.0)
    fail(machine, "a")
    assert machine.roster == ("a",)


def test_a_failure_on_a_node_that_left_the_world_blames_nobody():
    """Hung workers may be on a node that is gone already."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    assert told(machine, hung("gone", 20.0))[1].roster == ("a", "b")


def test_a_host_that_is_lost_too_often_is_left_out():
    """A world that is made anew for each of its visits is worse off than one without it."""
    machine = running("a", "b", nnodes="1:2", exclude_after=2)
    told(machine, lost("b", 20.0), joined("b2", 30.0, host="host-of-b"))
    run_on(machine, 31.0)
    told(machine, tick(machine.now), checkpointed("a", 32.0, attempt=2), stopped("a", 32.0, attempt=2))
    run_on(machine, 33.0)
    assert machine.roster == ("a", "b2")
    left_out = "b2 is left out for 60 s after 2 failures"
    why = f"b2 was lost: its agent died; {left_out}"
    assert told(machine, lost("b2", 40.0)) == [
        Shun(host="host-of-b", why=left_out),
        stop(3, "a", grace=0.0, why=why),
        launch(4, "a", why=why),
        WakeAt(at=100.0, why="all workers must be started by then"),
    ]


def test_a_spare_that_is_lost_too_often_disturbs_nobody():
    """Its host is left out, and the world goes on."""
    machine = running("a", "b", spares=1, exclude_after=1)
    told(machine, joined("c", 5.0))
    assert told(machine, lost("c", 6.0)) == [
        Shun(host="host-of-c", why="c is left out for 60 s after 1 failure"),
        WakeAt(at=66.0, why="more nodes may come"),
    ]
    assert machine.phase is Phase.RUNNING


def test_all_agents_of_a_host_that_is_lost_too_often_are_left_out():
    """Those of them that are in the world too."""
    machine = begun(job("1:3", exclude_after=1))
    told(machine, joined("a"), joined("b", host="h"), joined("c", host="h"))
    run_on(machine, 1.0)
    assert told(machine, lost("c", 20.0))[:2] == [
        Shun(host="h", why="c is left out for 60 s after 1 failure"),
        Release(node="b", why="c is left out for 60 s after 1 failure"),
    ]
    assert machine.roster == ("a",)


def test_a_needed_host_that_is_lost_is_welcome_and_the_last_to_be_chosen():
    """Nobody else may come; but where others do, they are in the world and it waits."""
    machine = running("a", "b", max_restarts=9, exclude_after=1)
    told(machine, lost("b", 6.0), stopped("a", 7.0), joined("B", 8.0, host="host-of-b"))
    assert (machine.roster, machine.health.excluded) == (("a", "B"), ())
    told(machine, joined("c", 9.0))
    fail(machine, "a", **ECHO)
    assert machine.roster == ("a", "c")


def test_a_drained_host_is_not_blamed_for_going():
    """It said so before."""
    machine = running("a", "b", exclude_after=1)
    told(machine, draining("b", 6.0), lost("b", 7.0))
    assert machine.health.doubtful == frozenset()


def test_hosts_that_do_not_answer_are_left_out():
    """Silence is a failure of the host, as much as its loss; and one failure, however many agents are there."""
    machine = begun(job("1:3", exclude_after=1))
    told(machine, joined("a"), joined("b"), joined("c", host="host-of-b"), started("a"))
    actions = told(machine, tick(120.0))
    silent = "did not start its workers in time"
    left_out = "b is left out for 60 s after 1 failure"
    assert actions[:3] == [
        Release(node="b", why=silent),
        Shun(host="host-of-b", why=left_out),
        Release(node="c", why=silent),
    ]
    assert actions[3].why == f"b, c {silent}; {left_out}"
    assert (machine.roster, machine.health.next_cooled) == (("a",), 180.0)


# Scripts that crash in a loop.


def crashes(machine: Machine, *, after: float = 1.0, often: int = 9, between: tuple[object, ...] = ()) -> list[float]:
    """How long the machine waits after each of so many crashes of a's script, at another line each time."""
    waits = []
    for line in range(often):
        fail(machine, "a", after, **raised("ValueError", line=line))
        waits.append((machine.not_before or machine.now) - machine.now)
        if machine.not_before is not None:
            told(machine, tick(machine.not_before))
            run_on(machine, machine.now)
        told(machine, *(word(machine.now, attempt=machine.attempt) for word in between))
    return waits


def looping(**settings: object) -> Machine:
    return running("a", **({"max_restarts": 99, "exclude_after": 0} | settings))


def test_a_script_that_crashes_soon_is_started_later_each_time():
    """Twice at once, then after 1 s, 2 s, 4 s, and a minute at most."""
    assert crashes(looping()) == [0, 0, 1, 2, 4, 8, 16, 32, 60]


def test_a_delayed_attempt_starts_when_its_time_has_come():
    """The workers are ended first, without grace; what is waited for is said."""
    machine = looping()
    crashes(machine, often=2)
    now = machine.now
    told(machine, failed("a", now + 1.0, attempt=3, **NAN))
    why = "rank 1 on a raised ValueError: NaN; restart 3 of 99; after 1 s, since it crashes again and again"
    assert (machine.phase, machine.status) == (Phase.STOPPING, why)
    assert told(machine, stopped("a", now + 1.2, attempt=3)) == [WakeAt(at=now + 2.0, why="1 of 1 nodes")]
    assert told(machine, joined("b", now + 1.5)) == []
    assert told(machine, tick(now + 2.0)) == [launch(4, "a", why=f"2 of 1 nodes; {why}"), start_by(now + 122.0)]
    assert machine.not_before is None


def test_the_last_call_is_no_delay_on_top():
    """An elastic job that is not full starts when the delay is over, too."""
    machine = looping(nnodes="1:4", last_call=30.0)
    assert crashes(machine, often=4) == [0, 0, 1, 2]
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 5)


@pytest.mark.parametrize(("after", "between"), [(10.0, ()), (1.0, (progressed,))])
def test_a_script_that_gets_anywhere_is_not_in_a_loop(after, between):
    """Ten seconds, or one step."""
    assert crashes(looping(), after=after, between=between, often=5) == [0] * 5


@pytest.mark.parametrize("facts", [{}, {"exit_code": -15}, ECHO])
def test_kills_from_outside_and_echoes_are_no_crash_loop(facts):
    """They say nothing of the script, and end the count."""
    machine = looping()
    for _ in range(5):
        fail(machine, "a", 1.0, **facts)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 6)
    assert crashes(machine, often=3) == [0, 0, 1]
    fail(machine, "a", 1.0, **facts)
    assert crashes(machine, often=2) == [0, 0]


def test_a_kill_for_want_of_memory_is_the_scripts_own():
    """The kernel's kill has evidence, and it will come again."""
    machine = looping()
    for _ in range(3):
        fail(machine, "a", 1.0, evidence="out of memory")
    assert machine.phase is Phase.GATHERING


def test_a_delay_ends_with_the_time_to_wait_for_nodes():
    """Where `join_timeout` is shorter, it is the limit; and the delay is forgotten with it."""
    machine = looping(join_timeout=0.5)
    crashes(machine, often=2)
    fail(machine, "a", 1.0, **NAN)
    actions = told(machine, tick(machine.now + 0.5))
    assert actions[0] == launch(4, "a", why="1 of 1 nodes; no more time to wait")
    assert machine.not_before is None


def test_a_node_is_lost_during_the_delay():
    """The delay is over before another comes, and adds nothing."""
    machine = looping()
    crashes(machine, often=2)
    fail(machine, "a", 1.0, **NAN)
    now = machine.now
    told(machine, lost("a", now + 0.5))
    assert told(machine, tick(now + 1.0)) == [WakeAt(at=now + 600.0, why="0 of 1 nodes")]
    assert told(machine, joined("b", now + 5.0))[0] == launch(4, "b", why="1 of 1 nodes; b joined")


# Workers that hang.


def test_a_hang_spends_a_restart():
    """Those that made no step are the cause; all are ended without grace, for they would not hear it."""
    machine = running("a", "b", max_restarts=1)
    why = "rank 1 on b was killed by SIGKILL; restart 1 of 1"
    assert told(machine, hung("b", 400.0)) == [
        stop(1, "a", "b", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_by(520.0),
    ]
    assert machine.restarts == 1


def test_a_hang_with_no_restarts_left_is_the_end():
    """As any failure."""
    machine = running("a")
    told(machine, hung("a", 400.0))
    assert told(machine, stopped("a", 401.0, failure("a", rank=0))) == [
        Finish(exit_code=1, why="rank 1 on a was killed by SIGKILL; no restarts were allowed")
    ]
    assert [each.rank for each in machine.failures] == [1, 0]


def test_a_hang_without_a_cause_changes_nothing():
    """Nobody can be named whom the others wait for."""
    machine = running("a", max_restarts=1)
    assert told(machine, WorkersHung(at=400.0, attempt=1, failures=())) == []
    assert machine.phase is Phase.RUNNING


def test_workers_that_start_or_stop_do_not_hang():
    """Each has its own deadline."""
    machine = begun(job(1, max_restarts=1))
    told(machine, joined("a"))
    assert told(machine, hung("a", 1.0)) == []
    told(machine, started("a", 2.0), asked("SIGINT", 3.0))
    assert told(machine, hung("a", 4.0)) == []
    assert machine.restarts == 0


def test_a_world_that_hangs_when_it_is_to_save_is_not_waited_for():
    """It was to be another in any case, so no restart is spent."""
    machine = running("a", nnodes="1:2", max_restarts=1)
    told(machine, joined("b", 10.0), progressed(11.0))
    assert machine.asking
    assert told(machine, hung("a", 15.0)) == [
        stop(1, "a", grace=0.0, why="rank 1 on a was killed by SIGKILL"),
        gone_by(25.0),
    ]
    assert told(machine, stopped("a", 15.1))[0] == launch(2, "a", "b", why="rank 1 on a was killed by SIGKILL")
    assert machine.restarts == 0


def test_the_cause_of_a_failure_told_with_its_echo_is_blamed():
    """The echo's host is not."""
    machine = running("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    echo = failure("a", 20.0, rank=0, **ECHO)
    cause = failure("b", 20.1, rank=1, **NAN)
    told(machine, exited("a", 20.2, echo, cause))
    assert machine.roster == ("a",)
