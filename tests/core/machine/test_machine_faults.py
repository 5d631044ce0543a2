"""The decisions of the machine about repeated faults: pardoned failures, excluded hosts, crash loops and hangs."""

from __future__ import annotations

import pickle

import pytest
from machine_helpers import (
    checkpointed,
    draining,
    exited,
    failed,
    failure,
    gathering_machine,
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
    state_fields,
    stop,
    stop_requested,
    stopped,
    stopping_timer,
    tick,
    uncordon,
)

from raylaunch.core.machine.events_and_actions import (
    Cordon,
    Event,
    Finish,
    NodeJoined,
    Release,
    SetTimer,
    WorkersHung,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.result import ResultBuilder

PEER_LOST = raised("RuntimeError", "Connection reset by peer")
NAN = raised("ValueError", "NaN")
LOST_B = "b was lost: its agent died"


def fail_and_restart(machine: Machine, node: str, after: float = 20.0, **facts: object) -> None:
    """Let a worker of the node fail and, if another attempt is launched, start all its workers."""
    handle_all(machine, failed(node, machine.now + after, attempt=machine.attempt, **facts))
    if machine.phase is Phase.STOPPING:
        handle_all(
            machine, *(stopped(node, machine.now, attempt=machine.attempt) for node in sorted(machine.state.awaited))
        )
    if machine.phase is Phase.STARTING:
        start_all_workers(machine, machine.now)


# Failures that the loss of a node explains.


def test_loss_of_a_node_gives_back_the_restart_of_its_peers_failure():
    """Peers see the closed connection at once; the node is reported as lost seconds later."""
    machine = running_machine("a", "b", "c", nnodes="2:3", max_restarts=1)
    handle_all(machine, failed("a", 10.0, **PEER_LOST))
    assert (machine.restarts, machine.attempt) == (1, 2)
    assert handle_all(machine, lost("b", 15.0))[1] == launch(3, "a", "c", why=LOST_B)
    assert machine.restarts == 0


def test_loss_gives_back_restarts_of_several_attempts():
    """Attempts that are launched on the dead node before it is reported as lost fail too."""
    machine = running_machine("a", "b", "c", nnodes="2:3", max_restarts=2)
    handle_all(machine, failed("a", 10.0, **PEER_LOST), failed("c", 12.0, attempt=2, **PEER_LOST))
    assert machine.restarts == 2
    handle_all(machine, lost("b", 15.0))
    assert (machine.restarts, machine.phase) == (0, Phase.STARTING)


def test_loss_of_a_node_gives_back_the_restart_of_a_kill_there():
    """Hosts that shut down kill their processes first."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=1)
    handle_all(machine, failed("b", 10.0))
    assert machine.restarts == 1
    assert handle_all(machine, lost("b", 15.0))[1] == launch(3, "a", why=LOST_B)
    assert machine.restarts == 0


@pytest.mark.parametrize(("who", "facts"), [("a", PEER_LOST), ("b", {}), ("b", {"exit_code": -15})])
def test_loss_cancels_the_end_of_a_run_without_restarts(who, facts):
    """The failure was about to end the run; the loss explains it, and the run continues."""
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, failed(who, 10.0, **facts))
    assert machine.state.ending is not None
    handle_all(machine, stopped("a", 11.0))
    assert handle_all(machine, lost("b", 15.0)) == [launch(2, "a", why=LOST_B), start_timer(135.0)]


def test_loss_cancels_the_end_and_the_run_gathers():
    """If the lost node is needed, the run gathers when the other nodes have stopped."""
    machine = running_machine("a", "b")
    handle_all(machine, failed("a", 10.0, **PEER_LOST))
    assert handle_all(machine, lost("b", 15.0)) == []
    assert (machine.phase, machine.status) == (Phase.STOPPING, LOST_B)
    assert handle_all(machine, stopped("a", 16.0)) == [SetTimer(at=616.0, why="1 of 2 nodes")]


@pytest.mark.parametrize(
    ("who", "facts", "when"),
    [
        ("a", PEER_LOST, 40.1),  # long after
        ("b", {}, 40.1),
        ("a", {}, 11.0),  # killed on another node
        ("a", NAN, 11.0),  # an error of the script
        ("b", NAN, 11.0),
        ("b", {"exit_code": 1}, 11.0),
        ("b", {"evidence": "out of memory"}, 11.0),  # killed by the OOM killer because of the script
        ("b", {"exit_code": -11}, 11.0),
    ],
)
def test_failures_that_a_loss_does_not_explain(who, facts, when):
    """The restart stays spent after failures of the script, failures long ago, and kills on other nodes."""
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=1)
    handle_all(machine, failed(who, 10.0, **facts), lost("b", when))
    assert machine.restarts == 1


def test_loss_explains_failures_of_the_last_30_seconds():
    """A loss exactly 30 s after the failure still explains it."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=1)
    handle_all(machine, failed("a", 10.0, **PEER_LOST), lost("b", 40.0))
    assert machine.restarts == 0


def test_a_restart_is_given_back_once():
    """The loss of a second node does not give back the same restart again."""
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=3)
    handle_all(
        machine, failed("a", 9.0, **NAN), failed("a", 10.0, attempt=2, **PEER_LOST), lost("b", 11.0), lost("c", 12.0)
    )
    assert machine.restarts == 1


def test_loss_of_a_spare_explains_nothing():
    """A node that was not part of the attempt cannot have caused the failure."""
    machine = running_machine("a", "b", max_restarts=1)
    handle_all(machine, joined("c", 5.0), failed("a", 10.0, **PEER_LOST), lost("c", 11.0))
    assert machine.restarts == 1


def test_stop_request_is_kept_when_a_failure_is_pardoned():
    """The run ends as the user requested, though a loss explains the failure before."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=1)
    handle_all(machine, failed("a", 10.0, **PEER_LOST), started("a", 10.1, attempt=2), stop_requested("SIGINT", 11.0))
    assert handle_all(machine, lost("b", 12.0)) == []
    assert handle_all(machine, stopped("a", 13.0, attempt=2)) == [Finish(exit_code=130, why="stopped by SIGINT")]


def test_pardoned_failure_does_not_count_as_the_same():
    """Failures that a loss explains do not count towards three equal failures within a minute."""
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=9, exclude_after=0)
    killed = {"exit_code": -15}
    fail_and_restart(machine, "a", 1.0, **NAN)
    fail_and_restart(machine, "b", 1.0, **killed)
    handle_all(machine, lost("b", machine.now + 1.0))
    start_all_workers(machine, machine.now)
    fail_and_restart(machine, "a", 1.0, **NAN)
    assert machine.phase is Phase.RUNNING
    fail_and_restart(machine, "a", 1.0, **NAN)
    assert machine.phase is Phase.DONE


# Excluded hosts.


def machine_with_excluded_host(
    *nodes: str, host: str, nnodes: str = "1:9", **settings: object
) -> tuple[Machine, list[object]]:
    """Return a machine on whose node b two workers failed, and the actions after the second failure."""
    machine = running_machine(*nodes, **({"nnodes": nnodes, "max_restarts": 9, "exclude_after": 2} | settings))
    assert machine.nodes["b"].host == host
    fail_and_restart(machine, "b", rank=2)
    actions = handle_all(machine, failed("b", machine.now + 20.0, attempt=2))
    return machine, actions


def test_host_that_fails_too_often_is_excluded():
    """Its node is released, its host is cordoned for 60 s, and the next attempt runs without it."""
    machine, actions = machine_with_excluded_host("a", "b", "c", host="host-of-b")
    left_out = "b is left out for 60 s after 2 failures"
    why = f"rank 1 on b was killed by SIGKILL; restart 2 of 9; {left_out}"
    now = machine.now
    assert actions == [
        Cordon(host="host-of-b", why=left_out),
        Release(node="b", why=left_out),
        stop(2, "a", "c", grace=0.0, why=why),
        launch(3, "a", "c", why=why),
        SetTimer(at=now + 60.0, why="all workers must be started by then"),
    ]


def test_exclusion_ends_after_its_time():
    """Nodes that join on an excluded host are released; after the exclusion they are taken in."""
    machine, _ = machine_with_excluded_host("a", "b", "c", host="host-of-b")
    start_all_workers(machine, machine.now)
    now = machine.now
    assert handle_all(machine, joined("b2", now + 5.0, host="host-of-b")) == [
        Release(node="b2", why="its host is left out at present")
    ]
    assert handle_all(machine, tick(now + 60.0)) == [uncordon("b")]
    assert handle_all(machine, joined("b3", now + 61.0, host="host-of-b")) == [
        SetTimer(at=now + 66.0, why="b3 joined; more may come")
    ]


def test_repeated_exclusion_lasts_twice_as_long():
    """Each exclusion is twice as long as the last, and comes after as many failures."""
    machine, _ = machine_with_excluded_host("a", "b", "c", host="host-of-b", nnodes="2:3")
    start_all_workers(machine, machine.now)
    for node, seconds in (("A", 120.0), ("B", 240.0), ("C", 480.0)):
        handle_all(machine, tick(machine.run.health.next_end or 0.0), joined(node, machine.now, host="host-of-b"))
        handle_all(machine, *(checkpointed(one, machine.now, attempt=machine.attempt) for one in machine.roster))
        handle_all(machine, *(stopped(one, machine.now, attempt=machine.attempt) for one in machine.roster))
        start_all_workers(machine, machine.now)
        fail_and_restart(machine, node)
        assert machine.run.health.excluded == ()
        fail_and_restart(machine, node)
        assert machine.run.health.next_end == machine.now + seconds


def test_needed_host_is_excluded_for_15_seconds():
    """A replacement has 15 s to join; else the host may be used again."""
    machine, actions = machine_with_excluded_host("a", "b", host="host-of-b", nnodes="2:9")
    now = machine.now
    left_out = "b is left out for 15 s after 2 failures, unless no other comes"
    why = f"rank 1 on b was killed by SIGKILL; restart 2 of 9; {left_out}"
    assert actions == [
        Cordon(host="host-of-b", why=left_out),
        Release(node="b", why=left_out),
        stop(2, "a", grace=0.0, why=why),
        SetTimer(at=now + 15.0, why="all workers must be gone by then"),
    ]
    assert handle_all(machine, stopped("a", now, attempt=2)) == []
    assert handle_all(machine, tick(now + 15.0))[0] == uncordon("b")
    handle_all(machine, joined("b2", now + 17.0, host="host-of-b"), tick(now + 22.0))
    assert machine.roster == ("a", "b2")


def test_replacement_joins_during_a_short_exclusion():
    """The attempt is launched on the replacement as soon as it joins."""
    machine, _ = machine_with_excluded_host("a", "b", host="host-of-b", nnodes="2:2")
    now = machine.now
    handle_all(machine, stopped("a", now, attempt=2))
    assert handle_all(machine, joined("c", now + 3.0))[0] == launch(3, "a", "c", why="2 of 2 nodes; c joined")


def test_exclusion_is_shortened_when_the_host_is_needed():
    """If other nodes are lost, a long exclusion ends after 15 s."""
    machine, _ = machine_with_excluded_host("a", "b", "c", host="host-of-b", nnodes="2:9")
    start_all_workers(machine, machine.now)
    now = machine.now
    handle_all(machine, lost("a", now + 1.0))
    assert handle_all(machine, stopped("c", now + 2.0, attempt=3)) == [
        SetTimer(at=now + 17.0, why="1 node (2 to 9 requested)")
    ]
    assert handle_all(machine, tick(now + 17.0))[0] == uncordon("b")


def test_short_exclusion_ends_before_join_timeout():
    """The exclusion of a needed host is at most half of `join_timeout`."""
    machine, actions = machine_with_excluded_host("a", "b", host="host-of-b", nnodes="2:9", join_timeout=8.0)
    assert "left out for 4 s" in actions[0].why
    now = machine.now
    handle_all(machine, stopped("a", now, attempt=2))
    assert handle_all(machine, tick(now + 4.0))[0] == uncordon("b")


def test_all_nodes_of_an_excluded_host_are_released():
    """Two nodes share the host; one failure excludes both."""
    machine = gathering_machine(job("1:3", max_restarts=9, exclude_after=1))
    handle_all(machine, joined("a"), joined("b", host="h"), joined("c", host="h"))
    start_all_workers(machine, 1.0)
    actions = handle_all(machine, failed("c", 20.0))
    left_out = "c is left out for 60 s after 1 failure"
    assert actions[:3] == [
        Cordon(host="h", why=left_out),
        Release(node="b", why=left_out),
        Release(node="c", why=left_out),
    ]
    assert machine.roster == ("a",)


def test_same_error_on_two_hosts_excludes_none():
    """The same error at the same place on two hosts is the script's."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9, exclude_after=2)
    for node in ("a", "b", "a", "b", "a"):
        fail_and_restart(machine, node, 100.0, **NAN)
    assert machine.run.health.excluded == ()
    assert machine.roster == ("a", "b")


@pytest.mark.parametrize("facts", [{"exit_code": -11}, {"exit_code": 1}])
def test_same_exit_code_on_two_hosts_excludes_none(facts):
    """The same signal or exit code on several hosts is the script's, on whatever rank."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=99, exclude_after=3)
    for number, node in enumerate("abbaabbbba"):
        fail_and_restart(machine, node, 100.0, **facts, rank=number)
    assert machine.run.health.excluded == ()


def test_three_equal_failures_on_one_host_exclude_it():
    """Three equal failures on one host exclude it instead of ending the run, if other nodes are enough."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9)
    for _ in range(3):
        fail_and_restart(machine, "b", **NAN)
    assert (machine.phase, machine.roster, machine.run.health.excluded) == (Phase.RUNNING, ("a",), ("host-of-b",))
    handle_all(machine, failed("a", machine.now + 1.0, attempt=machine.attempt, **NAN))
    assert machine.state.ending.why == "rank 1 on a raised ValueError: NaN; the same failure 3 times within 60 s"


def test_three_equal_failures_without_other_hosts_end_the_run():
    """If the host is needed, three equal failures end the run."""
    machine = running_machine("a", "b", max_restarts=9)
    for _ in range(3):
        fail_and_restart(machine, "b", **NAN)
    assert machine.phase is Phase.DONE


def test_collateral_failure_excludes_no_host():
    """A broken connection is the fault of another node."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    fail_and_restart(machine, "b", **PEER_LOST)
    assert machine.roster == ("a", "b")


def test_exclude_after_0_excludes_no_host():
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9, exclude_after=0)
    for _ in range(8):
        fail_and_restart(machine, "b")
    assert machine.roster == ("a", "b")


def test_unknown_hosts_are_not_excluded():
    """A node that joined without a host id is never excluded."""
    machine = gathering_machine(job(1, max_restarts=9, exclude_after=1))
    handle_all(machine, NodeJoined(at=0.0, node="a", address="10.0.0.1", nproc=2))
    start_all_workers(machine, 1.0)
    fail_and_restart(machine, "a")
    assert machine.roster == ("a",)


def test_failure_of_a_removed_node_excludes_no_host():
    """A hang may be reported for a node that is not a member any more."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    assert handle_all(machine, hung("gone", 20.0))[1].roster == ("a", "b")


def test_host_that_is_lost_too_often_is_excluded():
    """Losses of nodes count as failures of their host."""
    machine = running_machine("a", "b", nnodes="1:2", exclude_after=2)
    handle_all(machine, lost("b", 20.0), joined("b2", 30.0, host="host-of-b"))
    start_all_workers(machine, 31.0)
    handle_all(machine, tick(machine.now), checkpointed("a", 32.0, attempt=2), stopped("a", 32.0, attempt=2))
    start_all_workers(machine, 33.0)
    assert machine.roster == ("a", "b2")
    left_out = "b2 is left out for 60 s after 2 failures"
    why = f"b2 was lost: its agent died; {left_out}"
    assert handle_all(machine, lost("b2", 40.0)) == [
        Cordon(host="host-of-b", why=left_out),
        stop(3, "a", grace=0.0, why=why),
        launch(4, "a", why=why),
        SetTimer(at=100.0, why="all workers must be started by then"),
    ]


def test_exclusion_of_a_lost_spare_does_not_stop_the_attempt():
    """The host is excluded, and the attempt continues."""
    machine = running_machine("a", "b", spares=1, exclude_after=1)
    handle_all(machine, joined("c", 5.0))
    assert handle_all(machine, lost("c", 6.0)) == [
        Cordon(host="host-of-c", why="c is left out for 60 s after 1 failure"),
        SetTimer(at=66.0, why="more nodes may come"),
    ]
    assert machine.phase is Phase.RUNNING


def test_exclusion_after_a_loss_releases_other_nodes_of_the_host():
    """Nodes of the attempt on this host are released too."""
    machine = gathering_machine(job("1:3", exclude_after=1))
    handle_all(machine, joined("a"), joined("b", host="h"), joined("c", host="h"))
    start_all_workers(machine, 1.0)
    assert handle_all(machine, lost("c", 20.0))[:2] == [
        Cordon(host="h", why="c is left out for 60 s after 1 failure"),
        Release(node="b", why="c is left out for 60 s after 1 failure"),
    ]
    assert machine.roster == ("a",)


def test_needed_host_is_not_excluded_for_a_loss():
    """It is used again, but other nodes are preferred when they join."""
    machine = running_machine("a", "b", max_restarts=9, exclude_after=1)
    handle_all(machine, lost("b", 6.0), stopped("a", 7.0), joined("B", 8.0, host="host-of-b"))
    assert (machine.roster, machine.run.health.excluded) == (("a", "B"), ())
    handle_all(machine, joined("c", 9.0))
    fail_and_restart(machine, "a", **PEER_LOST)
    assert machine.roster == ("a", "c")


def test_loss_of_a_drained_host_does_not_count():
    """The loss was announced by the drain."""
    machine = running_machine("a", "b", exclude_after=1)
    handle_all(machine, draining("b", 6.0), lost("b", 7.0))
    assert machine.run.health.doubtful == frozenset()


def test_unresponsive_hosts_are_excluded():
    """Nodes that do not start in time count as one failure of their host, however many they are."""
    machine = gathering_machine(job("1:3", exclude_after=1))
    handle_all(machine, joined("a"), joined("b"), joined("c", host="host-of-b"), started("a"))
    actions = handle_all(machine, tick(120.0))
    silent = "did not start its workers in time"
    left_out = "b is left out for 60 s after 1 failure"
    assert actions[:3] == [
        Release(node="b", why=silent),
        Cordon(host="host-of-b", why=left_out),
        Release(node="c", why=silent),
    ]
    assert actions[3].why == f"b, c {silent}; {left_out}"
    assert (machine.roster, machine.run.health.next_end) == (("a",), 180.0)


# Scripts that crash in a loop.


def delays_after_crashes(
    machine: Machine, *, after: float = 1.0, often: int = 9, between: tuple[object, ...] = ()
) -> list[float]:
    """Return the seconds the machine waits after each of `often` crashes, each at another line of the script."""
    waits = []
    for line in range(often):
        fail_and_restart(machine, "a", after, **raised("ValueError", line=line))
        until = state_fields(machine)["backoff_until"]
        waits.append((until or machine.now) - machine.now)
        if until is not None:
            handle_all(machine, tick(until))
            start_all_workers(machine, machine.now)
        handle_all(machine, *(report(machine.now, attempt=machine.attempt) for report in between))
    return waits


def crash_loop_machine(**settings: object) -> Machine:
    """Return a machine on node a with many restarts and without exclusions."""
    return running_machine("a", **({"max_restarts": 99, "exclude_after": 0} | settings))


def test_crash_loop_delays_double():
    """Two restarts follow at once, the next after 1 s, 2 s, 4 s, and so on up to 60 s."""
    assert delays_after_crashes(crash_loop_machine()) == [0, 0, 1, 2, 4, 8, 16, 32, 60]


def test_delayed_attempt_starts_after_its_delay():
    """The workers are stopped first; then the machine gathers until the delay is over."""
    machine = crash_loop_machine()
    delays_after_crashes(machine, often=2)
    now = machine.now
    handle_all(machine, failed("a", now + 1.0, attempt=3, **NAN))
    why = "rank 1 on a raised ValueError: NaN; restart 3 of 99; after 1 s, since it crashes again and again"
    assert (machine.phase, machine.status) == (Phase.STOPPING, why)
    assert handle_all(machine, stopped("a", now + 1.2, attempt=3)) == [SetTimer(at=now + 2.0, why="1 of 1 nodes")]
    assert handle_all(machine, joined("b", now + 1.5)) == []
    assert handle_all(machine, tick(now + 2.0)) == [
        launch(4, "a", why=f"2 of 1 nodes; {why}"),
        start_timer(now + 122.0),
    ]
    assert state_fields(machine)["backoff_until"] is None


def test_last_call_runs_during_the_delay():
    """An elastic job below MAX starts when the delay is over, without a further last call."""
    machine = crash_loop_machine(nnodes="1:4", last_call=30.0)
    assert delays_after_crashes(machine, often=4) == [0, 0, 1, 2]
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 5)


@pytest.mark.parametrize(("after", "between"), [(10.0, ()), (1.0, (progressed,))])
def test_attempt_that_lasts_or_makes_a_step_is_no_crash_loop(after, between):
    """An attempt of 10 s or with one step ends the crash loop."""
    assert delays_after_crashes(crash_loop_machine(), after=after, between=between, often=5) == [0] * 5


@pytest.mark.parametrize("facts", [{}, {"exit_code": -15}, PEER_LOST])
def test_kills_and_collateral_failures_are_no_crash_loop(facts):
    """They are not delayed, and the next crash counts as the first again."""
    machine = crash_loop_machine()
    for _ in range(5):
        fail_and_restart(machine, "a", 1.0, **facts)
    assert (machine.phase, machine.attempt) == (Phase.RUNNING, 6)
    assert delays_after_crashes(machine, often=3) == [0, 0, 1]
    fail_and_restart(machine, "a", 1.0, **facts)
    assert delays_after_crashes(machine, often=2) == [0, 0]


def test_kill_by_the_oom_killer_is_part_of_a_crash_loop():
    """A kill with evidence of lacking memory is the script's own failure."""
    machine = crash_loop_machine()
    for _ in range(3):
        fail_and_restart(machine, "a", 1.0, evidence="out of memory")
    assert machine.phase is Phase.GATHERING


def test_join_timeout_limits_the_delay():
    """If `join_timeout` is shorter than the delay, the attempt starts then."""
    machine = crash_loop_machine(join_timeout=0.5)
    delays_after_crashes(machine, often=2)
    fail_and_restart(machine, "a", 1.0, **NAN)
    actions = handle_all(machine, tick(machine.now + 0.5))
    assert actions[0] == launch(4, "a", why="1 of 1 nodes; no more time to wait")
    assert state_fields(machine)["backoff_until"] is None


def test_node_lost_during_the_delay():
    """A replacement that joins after the delay is launched at once."""
    machine = crash_loop_machine()
    delays_after_crashes(machine, often=2)
    fail_and_restart(machine, "a", 1.0, **NAN)
    now = machine.now
    handle_all(machine, lost("a", now + 0.5))
    assert handle_all(machine, tick(now + 1.0)) == [SetTimer(at=now + 600.0, why="0 of 1 nodes")]
    assert handle_all(machine, joined("b", now + 5.0))[0] == launch(4, "b", why="1 of 1 nodes; b joined")


# Workers that hang.


def test_hang_spends_a_restart():
    """The hung workers are named as the cause; all are stopped without grace, since they would not react."""
    machine = running_machine("a", "b", max_restarts=1)
    why = "rank 1 on b was killed by SIGKILL; restart 1 of 1"
    assert handle_all(machine, hung("b", 400.0)) == [
        stop(1, "a", "b", grace=0.0, why=why),
        launch(2, "a", "b", why=why),
        start_timer(520.0),
    ]
    assert machine.restarts == 1


def test_hang_without_restarts_ends_the_run():
    machine = running_machine("a")
    handle_all(machine, hung("a", 400.0))
    assert handle_all(machine, stopped("a", 401.0, failure("a", rank=0))) == [
        Finish(exit_code=1, why="rank 1 on a was killed by SIGKILL; no restarts were allowed")
    ]
    assert [each.rank for each in machine.world.failures] == [1, 0]


def test_hang_without_failures_changes_nothing():
    machine = running_machine("a", max_restarts=1)
    assert handle_all(machine, WorkersHung(at=400.0, attempt=1, failures=())) == []
    assert machine.phase is Phase.RUNNING


def test_hang_while_starting_or_stopping_is_ignored():
    """STARTING and STOPPING have deadlines of their own."""
    machine = gathering_machine(job(1, max_restarts=1))
    handle_all(machine, joined("a"))
    assert handle_all(machine, hung("a", 1.0)) == []
    handle_all(machine, started("a", 2.0), stop_requested("SIGINT", 3.0))
    assert handle_all(machine, hung("a", 4.0)) == []
    assert machine.restarts == 0


def test_hang_while_saving_spends_no_restart():
    """The attempt was to be replaced anyway: it is stopped without grace."""
    machine = running_machine("a", nnodes="1:2", max_restarts=1)
    handle_all(machine, joined("b", 10.0), progressed(11.0))
    assert machine.phase is Phase.SAVING
    assert handle_all(machine, hung("a", 15.0)) == [
        stop(1, "a", grace=0.0, why="rank 1 on a was killed by SIGKILL"),
        stopping_timer(135.0),
    ]
    assert handle_all(machine, stopped("a", 15.1))[0] == launch(2, "a", "b", why="rank 1 on a was killed by SIGKILL")
    assert machine.restarts == 0


def test_host_of_the_root_cause_is_blamed():
    """Of failures that are reported together, only the host of the root cause is blamed."""
    machine = running_machine("a", "b", nnodes="1:2", max_restarts=9, exclude_after=1)
    collateral = failure("a", 20.0, rank=0, **PEER_LOST)
    cause = failure("b", 20.1, rank=1, **NAN)
    handle_all(machine, exited("a", 20.2, collateral, cause))
    assert machine.roster == ("a",)


# Runs that last for months.


@pytest.mark.parametrize("leaves", [False, True])
def test_memory_does_not_grow_with_restarts_and_joins(leaves):
    """Of the machine and of what the result is computed from: after 1,000 attempts it is what it was after 200."""
    a_job = job(2, max_restarts=10_000, exclude_after=0)
    machine, builder = Machine(a_job), ResultBuilder()
    sizes: dict[int, int] = {}

    def take(event: Event) -> None:
        builder.add(JournalEntry(event=event, actions=tuple(machine.handle(event))))

    machine.start()
    for node in ("a", "b"):
        take(joined(node))
    for number in range(1000):
        at = 100.0 * number
        for node in machine.roster:
            take(started(node, at + 1.0, attempt=machine.attempt))
        take(progressed(at + 2.0, attempt=machine.attempt))
        if leaves:
            take(joined(f"n{number}", at + 3.0))
            take(lost(machine.roster[-1], at + 4.0))
        else:
            take(failed("ab"[number % 2], at + 3.0, attempt=machine.attempt, **raised(f"Error{number}")))
        if number % 10 == 0:
            sizes[number] = len(pickle.dumps((machine, builder)))
            assert machine.attempt > number
    early, late = (max(sizes[number] for number in range(first, first + 300, 10)) for first in (150, 700))
    assert late < 1.02 * early
