"""What the driver tells a node: the newest goal has all that the node is to do."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.placement.environment import Member, Rendezvous, assign
from raylaunch.node.protocol.node_goal import (
    CapabilitySection,
    CommitCheckpoint,
    DumpStacks,
    LaunchWorkers,
    NodeGoal,
    NodeGoals,
    OpenStore,
    ProposeCheckpoint,
    SignalWorkers,
    StopWorkers,
)
from tests.profiles import examples


def launch(attempt):
    (part,) = assign(attempt, [Member(node="a", address="10.0.0.1", nproc=1, host="h")])
    meeting = Rendezvous(
        master_addr="10.0.0.1", master_port=1, run_id="run", max_restarts=0, restart_count=0, role="default"
    )
    return LaunchWorkers(assignment=part, rendezvous=meeting)


def goal(*orders):
    return functools.reduce(NodeGoal.after, orders, NodeGoal())


def test_a_launch_takes_the_place_of_all_about_earlier_attempts():
    """It kills what is left of them anyway. The store of the next attempt is opened before that is launched."""
    before = [
        *(launch(1), StopWorkers(attempt=1, grace=9.0), SignalWorkers(attempt=1, signal="SIGUSR1")),
        *(DumpStacks(attempt=1), ProposeCheckpoint(attempt=1, step=3), CommitCheckpoint(attempt=1, step=3)),
        OpenStore(attempt=1),
    ]
    stays = [OpenStore(attempt=2), OpenStore(attempt=3), CapabilitySection(capability="a", body=b"1")]
    found = goal(*before, *stays, launch(2))
    assert [*found.since(0)] == [*stays, launch(2)]
    assert found.generation == len(before) + len(stays) + 1


def test_the_newest_order_of_a_kind_counts():
    """But each signal is another one, and so is the store of each attempt."""
    signals = [SignalWorkers(attempt=1, signal=name) for name in ("SIGUSR1", "SIGUSR2")]
    steps = [ProposeCheckpoint(attempt=1, step=step) for step in (3, 5)]
    stops = [StopWorkers(attempt=1, grace=grace) for grace in (9.0, 0.0)]
    found = goal(launch(1), *signals, *steps, *stops, signals[0])
    assert [*found.since(0)] == [launch(1), signals[1], steps[1], stops[1], signals[0]]


def test_the_newest_section_of_each_capability_counts():
    shown = [CapabilitySection(capability=name, body=body) for name, body in (("a", b"1"), ("b", b"2"), ("a", b"3"))]
    assert [*goal(*shown, launch(1)).since(0)] == [*shown[1:], launch(1)]


def test_a_node_carries_out_what_is_new():
    assert [*goal(launch(1), DumpStacks(attempt=1)).since(1)] == [DumpStacks(attempt=1)]
    assert [*goal(launch(1), DumpStacks(attempt=1)).since(2)] == []


def test_each_node_has_its_own_goal():
    goals = NodeGoals()
    goals.add("a", launch(1))
    assert goals.add("a", DumpStacks(attempt=1)).generation == 2
    assert goals.of("b") == NodeGoal()


def test_the_generations_of_all_goals_are_of_one_count():
    """What two nodes keep of a driver can be compared by them. A node has no order again that it has carried out."""
    goals = NodeGoals()
    goals.add("a", launch(1))
    assert goals.add("b", launch(1)).generation == goals.next_generation() - 1 == 2
    assert [*goals.add("a", DumpStacks(attempt=1)).since(3)] == [DumpStacks(attempt=1)]
    goals.take_over("c", NodeGoal(generation=9))
    assert goals.next_generation() == 10


def test_another_driver_goes_on_with_the_goal_of_a_node():
    """What it has to tell before it knows that goal comes after what the node was told."""
    others = NodeGoals()
    others.add("a", SignalWorkers(attempt=1, signal="SIGUSR1"))
    assert others.take_over("a", goal(launch(1))) == goal(launch(1), SignalWorkers(attempt=1, signal="SIGUSR1"))
    assert others.of("a").generation == 2


def test_a_node_may_have_to_end_the_workers_of_two_attempts():
    """It may not have been told of the second one yet."""
    told = goal(launch(1), StopWorkers(attempt=1, grace=0.0), StopWorkers(attempt=2, grace=0.0))
    assert [order.attempt for order in told.since(1)] == [1, 2]


orders = st.sampled_from(
    [
        *(launch(1), launch(2), StopWorkers(attempt=1, grace=1.0), StopWorkers(attempt=2, grace=0.0)),
        *(OpenStore(attempt=2), OpenStore(attempt=3), DumpStacks(attempt=2), ProposeCheckpoint(attempt=2, step=4)),
    ]
)


@examples(200)
@given(st.lists(orders, min_size=1, max_size=12), st.data())
def test_goals_may_be_lost_or_come_in_any_order(several, data):
    """The last order of each kind is carried out once, whichever goals come, and in the order in which they were given."""
    goals = [goal(*several[: number + 1]) for number in range(len(several))]
    received = [*data.draw(st.lists(st.sampled_from(goals), max_size=12)), goals[-1]]
    obeyed, carried_out = 0, []
    for one in received:
        carried_out += one.since(obeyed)
        obeyed = max(obeyed, one.generation)
    needed = [*goals[-1].since(0)]
    places = [len(carried_out) - 1 - carried_out[::-1].index(order) for order in needed]
    assert places == sorted(places)
    assert all(carried_out.count(order) <= several.count(order) for order in needed)
