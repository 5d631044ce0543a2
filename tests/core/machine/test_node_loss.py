"""Hosts that the driver reaches, but that cannot reach each other: which are left out, and how the run goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import (
    WAITING,
    failed,
    gathering_machine,
    handle_all,
    job,
    joined,
    progressed,
    raised,
    running_machine,
    start_all_workers,
    stop_requested,
    stopped,
    tick,
)

from raylaunch.core.machine.events_and_actions import Cordon, Finish, PeersUnreachable, Release, Stop, UnreachablePeer
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.peers import hosts_to_leave_out
from raylaunch.core.machine.state import Phase
from tests.profiles import examples

PEER_LOST = raised("RuntimeError", "Connection reset by peer")
B_AND_C = "b (10.0.0.98) and c (10.0.0.99) cannot reach each other: b cannot connect to c: timed out"


def unreachable(*pairs: str, at: float = 20.0, attempt: int = 1) -> PeersUnreachable:
    """Return the event for pairs of nodes such as `bc`: b cannot connect to c."""
    peers = tuple(UnreachablePeer(node=node, peer=peer, why="timed out") for node, peer in pairs)
    return PeersUnreachable(at=at, attempt=attempt, peers=peers)


def test_the_node_that_joined_later_is_left_out():
    """The next attempt is launched at once, and costs no restart."""
    machine = running_machine("a", "b", "c", nnodes="2:3", max_restarts=0)
    actions = handle_all(machine, unreachable("bc", "cb"))
    why = f"{B_AND_C}; c is left out for 60 s"
    assert actions[:3] == [
        Cordon(host="host-of-c", why=why),
        Release(node="c", why=why),
        Stop(attempt=1, nodes=("a", "b"), grace=0.0, why=why),
    ]
    assert machine.roster == ("a", "b")
    assert machine.phase is Phase.STARTING
    assert machine.restarts == 0
    handle_all(machine, tick(80.0), joined("c2", 81.0, host="host-of-c"))
    assert "c2" in machine.nodes


def test_the_host_of_node_rank_0_stays():
    """Though it may have joined later than the other: nodes are ordered by their addresses."""
    machine = running_machine("b", "a", nnodes="1:2")
    rank_0, other = machine.roster
    handle_all(machine, unreachable("ab"))
    assert (machine.roster, [*machine.nodes]) == ((rank_0,), [rank_0])
    assert other != rank_0


def test_the_host_with_the_most_broken_pairs_is_left_out():
    """Even if it has node rank 0."""
    machine = running_machine("a", "b", "c", nnodes="1:3")
    handle_all(machine, unreachable("ab", "ca"))
    assert machine.roster == ("b", "c")


def test_all_nodes_of_the_host_are_released():
    machine = gathering_machine(job("1:3"))
    handle_all(machine, joined("a"), joined("b", host="h"), joined("c", host="h"))
    start_all_workers(machine, 1.0)
    actions = handle_all(machine, unreachable("ac", "bc"))
    (cordon,) = [action for action in actions if isinstance(action, Cordon)]
    assert cordon.why.endswith("; b and c are left out for 60 s")
    assert machine.roster == ("a",)


def test_many_pairs_are_not_all_named():
    nodes = "abcdef"
    machine = running_machine(*nodes, nnodes="1:6")
    actions = handle_all(machine, unreachable(*(f"{one}{other}" for one, other in combinations(nodes, 2))))
    assert actions[0].why.count("cannot reach each other") == 3
    assert "; nor can 12 more pairs; " in actions[0].why
    assert machine.roster == ("a",)


@pytest.mark.parametrize(
    "event",
    [
        unreachable("bx"),
        unreachable("xb"),
        unreachable(),
        unreachable("bb"),
    ],
)
def test_nodes_that_were_lost_since_do_not_count(event):
    assert handle_all(running_machine("a", "b", nnodes="1:2"), event) == []


def test_a_next_attempt_that_works_is_not_disturbed():
    """Not all workers need to reach each other: NCCL connects them in a ring."""
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=3)
    handle_all(machine, failed("c", 5.0, **PEER_LOST))
    start_all_workers(machine, 6.0)
    handle_all(machine, progressed(7.0, attempt=2))
    assert handle_all(machine, unreachable("bc")) == []
    assert machine.roster == ("a", "b", "c")


def test_failures_that_followed_from_it_cost_no_restart():
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=3)
    handle_all(machine, progressed(4.0), failed("c", 5.0, **PEER_LOST))
    assert machine.restarts == 1
    handle_all(machine, unreachable("cb", at=10.0))
    assert machine.restarts == 0
    assert machine.roster == ("a", "b")


def test_the_failure_that_would_have_ended_the_run_is_pardoned():
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=0)
    handle_all(machine, failed("b", 5.0, **PEER_LOST))
    assert machine.phase is Phase.STOPPING
    machine.run.budget.spend(machine.world.failures[0], 5.0, machine.world.nodes)
    handle_all(machine, unreachable("cb", at=6.0), stopped("a", 7.0))
    assert machine.phase is Phase.STOPPING
    assert handle_all(machine, stopped("b", 7.0))[-1] != Finish(exit_code=1, why="")


def test_with_too_few_nodes_the_run_waits_for_another_one():
    machine = running_machine("a", "b", "c", nnodes=3)
    actions = handle_all(machine, unreachable("bc"))
    assert actions[0].why == f"{B_AND_C}; c is left out for 15 s, unless no other comes"
    handle_all(machine, stopped("a", 20.0), stopped("b", 20.0), joined("d", 25.0))
    assert machine.roster == ("a", "b", "d")


def separated_again(*, since: float, until: float, progress: bool, **settings) -> Machine:
    """Return the machine of three needed nodes, two of which could not reach each other at these two times."""
    machine = running_machine("a", "b", "c", nnodes=3, **settings)
    if progress:
        handle_all(machine, progressed(2.0))
    handle_all(machine, unreachable("bc", at=since), stopped("a", since), stopped("b", since))
    handle_all(machine, tick(since + 15.0), joined("c", since + 15.0, host="host-of-c"))
    assert machine.roster == ("a", "b", "c")
    start_all_workers(machine, since + 16.0)
    handle_all(machine, unreachable("bc", at=until, attempt=2))
    return machine


def test_a_network_that_never_worked_ends_the_run_the_second_time():
    machine = separated_again(since=20.0, until=50.0, progress=False)
    handle_all(machine, stopped("a", 50.0, attempt=2))
    (finish,) = handle_all(machine, stopped("b", 50.0, attempt=2))
    assert finish == Finish(exit_code=3, why=f"{B_AND_C}; without c, there are 2 of 3 nodes")


@pytest.mark.parametrize(("until", "phase"), [(50.0, Phase.STARTING), (140.0, Phase.DONE)])
def test_one_that_worked_before_may_be_mended_within_join_timeout(until, phase):
    machine = separated_again(since=20.0, until=until, progress=True, join_timeout=100.0)
    handle_all(machine, stopped("a", until, attempt=2), stopped("b", until, attempt=2))
    if machine.phase is Phase.GATHERING:
        handle_all(machine, tick(until + 15.0), joined("c", until + 15.0, host="host-of-c"))
    assert machine.phase is phase


def test_one_step_says_nothing_of_the_network():
    """A script may call `heartbeat()` before its first collective."""
    machine = running_machine("a", "b", "c", nnodes="1:3", max_restarts=3)
    handle_all(machine, failed("c", 5.0, **PEER_LOST))
    start_all_workers(machine, 6.0)
    handle_all(machine, replace(progressed(7.0, attempt=2), marks=1), unreachable("bc"))
    assert machine.roster == ("a", "b")


def test_a_step_says_that_the_network_works():
    machine = separated_again(since=20.0, until=50.0, progress=True, join_timeout=100.0)
    handle_all(machine, stopped("a", 50.0, attempt=2), stopped("b", 50.0, attempt=2))
    handle_all(machine, tick(65.0), joined("c", 65.0, host="host-of-c"))
    start_all_workers(machine, 66.0)
    handle_all(machine, progressed(67.0, attempt=3), unreachable("bc", at=200.0, attempt=3))
    assert machine.state.ending is None


@pytest.mark.parametrize("progress", [True, False])
def test_hosts_that_are_apart_while_the_run_waits_for_nodes(progress):
    """The attempt whose nodes were tried is over. The second time, the run ends, or goes on waiting."""
    machine = running_machine("a", "b", "c", nnodes=3)
    if progress:
        handle_all(machine, progressed(2.0))
    handle_all(machine, unreachable("bc"), stopped("a", 20.0), stopped("b", 20.0))
    assert machine.phase is Phase.GATHERING
    actions = handle_all(machine, unreachable("ab", at=35.0))
    assert machine.phase is (Phase.GATHERING if progress else Phase.DONE)
    assert [action.exit_code for action in actions if isinstance(action, Finish)] == ([] if progress else [3])


def test_hosts_that_are_apart_while_the_run_stops_for_nodes():
    machine = running_machine("a", "b", "c", "d", nnodes=4)
    handle_all(machine, unreachable("cd"))
    assert machine.state.ending is None
    handle_all(machine, unreachable("bc", at=21.0))
    assert machine.state.ending is None
    assert handle_all(machine, unreachable("ab", at=35.0), stopped("a", 36.0))[-1].exit_code == 3


def test_an_end_that_a_person_asked_for_is_not_delayed():
    machine = running_machine("a", "b", nnodes="1:2")
    handle_all(machine, stop_requested("SIGINT", 2.0))
    assert handle_all(machine, unreachable("ab")) == []


hosts = st.sampled_from("abcdef")
pairs = st.sets(st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1]))


@examples(300)
@given(pairs, st.permutations("abcdef"))
def test_those_that_are_left_reach_each_other(pairs, order):
    """And nobody is left out that reaches all who are left, but for the order in which hosts are left out."""
    gone = hosts_to_leave_out(pairs, order)
    assert len(set(gone)) == len(gone)
    assert all(one in gone or other in gone for one, other in pairs)
    assert all(any(host in pair for pair in pairs) for host in gone)


@examples(300)
@given(hosts, st.permutations("abcdef"), st.integers(2, 5))
def test_of_a_host_that_none_reaches_only_that_one_is_left_out(host, order, number):
    others = [other for other in order if other != host][:number]
    assert hosts_to_leave_out([(host, other) for other in others], order) == [host]


@examples(200)
@given(st.data())
def test_whenever_it_happens_the_run_goes_on_with_nodes_that_reach_each_other(data):
    """In every phase, and with hosts that come back: no attempt has a pair that is known to be broken."""
    machine = gathering_machine(job("1:6", max_restarts=3))
    handle_all(machine, *(joined(node, host=f"host-of-{node}") for node in "abcdef"))
    now = 1.0
    for _ in range(data.draw(st.integers(1, 5))):
        now += data.draw(st.sampled_from((0.1, 5.0, 100.0)))
        step = data.draw(st.sampled_from(("start", "fail", "stop", "tick", "apart")))
        if step == "start":
            start_all_workers(machine, now)
        elif step == "fail" and machine.roster[0] in machine.nodes:
            handle_all(machine, failed(machine.roster[0], now, attempt=machine.attempt, **PEER_LOST))
        elif step == "stop":
            handle_all(machine, *(stopped(node, now, attempt=machine.attempt) for node in machine.roster))
        elif step == "tick":
            handle_all(machine, tick(now))
        broken = data.draw(pairs) if step == "apart" else set()
        handle_all(machine, unreachable(*map("".join, broken), at=now, attempt=machine.attempt))
        there = set(machine.nodes)
        if step == "apart" and machine.phase in (Phase.STARTING, *WAITING):
            assert not any({one, other} <= there for one, other in broken)
        assert machine.phase is not Phase.DONE or machine.state.status
